"""Other libraries: every private name that this project relies on, and every patch that it makes."""
