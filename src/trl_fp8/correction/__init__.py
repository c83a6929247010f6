"""Off-policy statistics: log-ratios, weights, rejection and mismatch over plain tensors."""
