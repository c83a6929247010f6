"""Which tensors of a model are FP8, decided by name."""
