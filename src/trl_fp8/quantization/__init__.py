"""Number formats: codes, scales and checksums of plain tensors. Imports no other folder of this package.

formats.py  the facts of each format, without torch, because a plan reads them
kernels/    Triton kernels, for a GPU; imports formats
codec/      the interface: plain torch on CPU, the kernels on a GPU; imports formats and kernels
"""
