"""Scripts that accelerate starts on each process."""
