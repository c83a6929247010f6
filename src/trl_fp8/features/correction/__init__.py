"""Rollout correction: importance weights and rejection from the trainer's and the engine's log-probs."""
