"""What each word of the console script does. A command imports only what it needs: torch takes seconds."""
