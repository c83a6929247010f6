"""One forward: the trainer computes with the engine's kernels, on the engine's tensors."""
