"""A checksum of a tensor's bytes that stays on the device, for comparing what was sent with what arrived.

The tensor is read as 32-bit words in a matrix [R, C]. Word (r, c) is multiplied by the odd key 2 (r + c P) + 1 and
all products are summed modulo 2**64. Since each key is odd, changing any one word always changes the sum; since keys
differ between positions, exchanging words, rows or whole tensors does too, except by a coincidence of 2**-32 or rarer.
It protects against mistakes, not against an adversary. Keys factor into rows and columns: two integer sums over the
bytes are all the work.
"""

import torch


_P = 0x1E3779B97F4A7C15  # any large odd number that fits into int64
_PART = 2**22  # words: a cast, and the copy in 64 bits that integer sums make on CPU, stay small


def digest(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """int64 0-d checksum on `tensor`'s device, of its bytes and their positions (not of its dtype or shape).

    Takes any strides, casts to `dtype` first if one is given, and pads the last word with zeros.
    """
    total, row = torch.zeros((), dtype=torch.int64, device=tensor.device), 0
    for part in _parts(tensor.detach(), dtype or tensor.dtype):
        words = _words(part.to(dtype or tensor.dtype))
        if words.is_cuda:
            from .checksums import sum_table, table_of  # Triton compiles for GPUs only

            total += sum_table(table_of([words], first_row=row))[0]
        else:
            _add_words_by_torch(total, words, row)
        row += words.shape[0]
    return total


def _add_words_by_torch(total: torch.Tensor, words: torch.Tensor, first_row: int) -> None:
    """What checksums.py does on a GPU."""
    rows, columns = words.shape
    row_key = 2 * torch.arange(first_row, first_row + rows) + 1
    column_key = 2 * _P * torch.arange(columns)  # wraps modulo 2**64, as do the products
    by_row, by_column = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
    total.add_((by_row * row_key).sum()).add_((by_column * column_key).sum())


def _parts(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """`tensor` along its first dim, in parts of about `_PART` words; whole where rows are no whole number of words."""
    if tensor.dim() < 2 or not tensor.numel() or tensor.shape[-1] * dtype.itemsize % 4:
        return (tensor,)
    words = tensor[0].numel() * dtype.itemsize // 4
    return tensor.split(max(1, _PART // words))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor` as int32 `[R, C]`; `C` spans the last dim if that is a whole number of words."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    row_bytes = tensor.shape[-1:].numel() * tensor.element_size()  # of one element in 0-d
    if flat.numel() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    words = flat.view(torch.int32)
    return words.view(-1, row_bytes // 4) if row_bytes and row_bytes % 4 == 0 else words.view(1, -1)
