"""vLLM on a CPU, with reference kernels that leave weights as they were loaded and round as transformers does."""
