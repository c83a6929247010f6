"""Triton kernels of the codecs. They are imported inside functions, because hosts without a GPU may have no Triton."""
