"""Number formats: codes, scales and checksums over plain tensors. Imports torch and torchao, nothing of ours."""
