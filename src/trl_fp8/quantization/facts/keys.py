"""The number that checksums of tensors are defined by, see codec/digest.py."""

# Any large odd number that fits into int64. The key of word (r, c) is 2 (r + c COLUMN_STEP) + 1
COLUMN_STEP = 0x1E3779B97F4A7C15
