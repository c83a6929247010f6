"""Triton kernels of the codecs. Imported inside functions: Triton is there beside a GPU."""
