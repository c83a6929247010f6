"""vLLM servers as engines of a trainer: what runs in the server, and what talks to it."""
