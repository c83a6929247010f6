"""Truncated sampling: log-probs over the tokens that top-k, top-p and min-p left."""
