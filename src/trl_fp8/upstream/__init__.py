"""Every private name of another library that this project relies on, and every patch that it makes."""
