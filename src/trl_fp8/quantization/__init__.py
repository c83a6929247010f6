"""Number formats: codes, scales and checksums over plain tensors. Imports torch and torchao, nothing of ours.

facts.py    the numbers of each format, without torch: a plan reads them
kernels/    Triton, on a GPU; imports facts
codec/      what others call: plain torch on CPU, the kernels on a GPU; imports facts and kernels
"""
