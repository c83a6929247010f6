"""The FP8 tensors of a model, decided by name."""
