"""A checksum of a tensor's bytes that stays on the device, for comparing what was sent with what arrived.

The tensor is read as 32-bit words in a matrix [R, C]. Word (r, c) is multiplied by the odd key 2 (r + c P) + 1 and
all products are summed modulo 2**64. Since the key of each position is odd, changing any one word always changes the
sum; since keys differ between positions, exchanging words, rows or whole tensors does too, except by a coincidence of
2**-32 or rarer. It is no protection against an adversary, only against mistakes.

Keys factor into rows and columns, so the work is two integer sums over the bytes. On CPU these make a copy in 64 bits,
twice the bytes, so large tensors are taken in parts.
"""

import torch


_P = 0x1E3779B97F4A7C15  # any large odd number that fits into int64
_PART = 2**22  # words


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """int64 0-d checksum on `tensor`'s device, of its bytes and their positions (not of its dtype or shape).

    Args:
        tensor: Any dtype, any shape, any strides. A trailing odd number of bytes is padded with zeros.
    """
    words = _words(tensor.detach())
    rows, columns = words.shape
    row_key = 2 * torch.arange(rows, device=words.device) + 1
    column_key = 2 * _P * torch.arange(columns, device=words.device)  # wraps modulo 2**64, as do the products
    parts = words.split(max(1, _PART // max(1, columns)))
    by_row = torch.cat([part.sum(1, dtype=torch.int64) for part in parts])
    by_column = sum(part.sum(0, dtype=torch.int64) for part in parts)
    return (by_row * row_key).sum() + (by_column * column_key).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor` as int32 `[R, C]`; `C` spans the last dim if that is a whole number of words."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    row_bytes = tensor.shape[-1] * tensor.element_size() if tensor.dim() else tensor.element_size()
    if flat.numel() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    words = flat.view(torch.int32)
    return words.view(-1, row_bytes // 4) if row_bytes and row_bytes % 4 == 0 else words.view(1, -1)
