"""What each word of the console script does."""
