"""Number formats: codes, scales and checksums over plain tensors. Imports torch and torchao, nothing of ours.

formats.py  the numbers of each format, without torch: a plan reads them
kernels/    Triton, on a GPU; imports formats
codec/      what others call: plain torch on CPU, the kernels on a GPU; imports formats and kernels
"""
