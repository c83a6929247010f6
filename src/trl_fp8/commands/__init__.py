"""Commands of the console script, a module each."""
