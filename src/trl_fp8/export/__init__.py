"""FP8 checkpoints: written, verified, pushed."""
