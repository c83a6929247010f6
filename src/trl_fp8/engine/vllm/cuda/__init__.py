"""vLLM on an NVIDIA GPU, with kernels that give a token the same bits in every batch: a trainer can share them."""
