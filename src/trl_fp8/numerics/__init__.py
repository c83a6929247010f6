"""Formats, quantizers, scales and statistics over plain tensors.

This layer imports torch and torchao only. It knows nothing of transformers, TRL or vLLM, so every number in the
project can be checked without starting any of them.
"""
