"""Which tensors of a model are FP8, decided by name. Importing it pulls in neither torch nor transformers."""
