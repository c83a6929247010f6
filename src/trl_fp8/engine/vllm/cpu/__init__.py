"""vLLM on a CPU, with reference kernels that keep what they are given and round as transformers does."""
