"""Checksums of tensors' bytes that stay on the device, for comparing what was sent with what arrived.

A tensor is read as 32-bit words in a matrix [R, C]. Word (r, c) is multiplied by the odd key 2 (r + c P) + 1, where P
is `COLUMN_STEP`, and all products are summed modulo 2**64. Each key is odd, and an odd number has an inverse modulo
2**64: changing any one word always changes the sum. Keys differ between positions: exchanging words, rows or whole
tensors changes it too, except by a coincidence of 2**-32 or rarer. It protects against mistakes, not an adversary.

Two properties make it cheap. Keys are a number of the row plus a number of the column, so that two plain sums over the
bytes, by row and by column, are all the work: sum w (2r + 1 + 2cP) = sum_r (2r + 1) sum_c w + sum_c 2cP sum_r w. And
sums are linear: those of parts, each with its `first_row`, add up to that of the whole.

On a GPU a kernel reads many tensors in one launch (kernels/checksum_kernels.py). Hosts without a GPU may have no
Triton, so that the kernels are imported where they are called.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from trl_fp8.quantization.formats import COLUMN_STEP


_PART = 2**18  # words that are looked at together: a cast, and what integer sums copy on CPU, stay small


def digest(tensor: torch.Tensor, dtype: torch.dtype | None = None, first_row: int = 0) -> torch.Tensor:
    """int64 0-d checksum on `tensor`'s device, of its bytes and their positions (not of its dtype or shape).

    Takes any strides, casts to `dtype` first if one is given, and pads the last word with zeros. `first_row` is the
    row that the tensor's first one has in a larger tensor of which it is a part.
    """
    dtype = dtype or tensor.dtype
    return sum(_sum_of_words(part.to(dtype), first_row + row) for part, row in _parts(tensor.detach(), dtype))


class Table:
    """Tensors of one device that stay where they are, whose checksums are taken again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        in_table = [number for number, tensor in enumerate(tensors) if tensor.is_cuda and _holds_words(tensor)]
        rest = [number for number in range(len(tensors)) if number not in set(in_table)]
        self._rest = [tensors[number].detach() for number in rest]
        self._table = None
        if in_table:
            from trl_fp8.quantization.kernels.checksum_kernels import table_of

            self._table = table_of([tensors[number].detach() for number in in_table])
            self._places = torch.tensor([*in_table, *rest]).argsort().to(tensors[0].device)

    def sums(self) -> torch.Tensor:
        """int64 `[n]` on the device: `digest` of each tensor as it is now."""
        rest = [digest(tensor) for tensor in self._rest]
        if self._table is None:
            return torch.stack(rest) if rest else torch.zeros(0, dtype=torch.int64)
        from trl_fp8.quantization.kernels.checksum_kernels import sum_table

        sums = sum_table(self._table)
        return torch.cat([sums, torch.stack(rest)])[self._places] if rest else sums


def _holds_words(tensor: torch.Tensor) -> bool:
    """Whether each row is whole words of 4 bytes, and begins at one."""
    size = tensor.element_size()
    return size % 4 == 0 or (tensor.shape[-1:].numel() * size % 4 == 0 and tensor.data_ptr() % 4 == 0)


def digests_of_sent(
    tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of at least one tensor, cast to its dtype of `dtypes`: `digest`, int64 `[n]`, and whether it is finite,
    bool `[n]`.
    """
    if tensors[0].is_cuda and all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        from trl_fp8.quantization.kernels.checksum_kernels import sum_sent

        sums, bad = sum_sent([tensor.detach() for tensor in tensors], dtypes)
        return sums, bad == 0
    found = torch.zeros(2, len(tensors), dtype=torch.int64, device=tensors[0].device)  # checksums, parts not finite
    for number, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        for part, row in _parts(tensor.detach(), dtype):
            cast = part.to(dtype)
            found[:, number] += torch.stack([_sum_of_words(cast, row), ~_is_finite(cast)])
    return found[0], found[1] == 0


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Bool 0-d. NaN and infinity show in the extremes, which a norm would show, too, in 15 times the time on CPU."""
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():  # e4m3 has no infinity, and torch no order of it
        return ~tensor.isnan().any()
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def _sum_of_words(tensor: torch.Tensor, first_row: int) -> torch.Tensor:
    """The checksum of a tensor that has few words."""
    words = _words(tensor)
    if words.is_cuda:
        from trl_fp8.quantization.kernels.checksum_kernels import sum_table, table_of

        return sum_table(table_of([words], first_row=first_row))[0]
    wide = words.long()  # each sum would make its own, more slowly
    by_row, by_column = wide.sum(1), wide.sum(0)
    return by_row @ _row_keys(first_row, words.shape[0]) + by_column @ _column_keys(words.shape[1])


@lru_cache(256)
def _row_keys(first: int, count: int) -> torch.Tensor:
    return 2 * torch.arange(first, first + count) + 1


@lru_cache(256)
def _column_keys(count: int) -> torch.Tensor:
    return 2 * COLUMN_STEP * torch.arange(count)  # wraps modulo 2**64, as do the products


def _parts(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, int]]:
    """`tensor` along its first dim, in parts of about `_PART` words, and each part's first row in the matrix of words;
    whole where rows are no whole number of words.
    """
    if tensor.dim() < 2 or not tensor.numel() or tensor.shape[-1] * dtype.itemsize % 4:
        yield tensor, 0
        return
    rows = tensor[0].numel() // tensor.shape[-1]
    count = max(1, _PART // (tensor[0].numel() * dtype.itemsize // 4))
    for number, part in enumerate(tensor.split(count)):
        yield part, number * count * rows


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as int32 `[R, C]`; `C` spans the last dim if that is a whole number of words."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if len(flat) % 4:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % 4))
    row_bytes = tensor.shape[-1:].numel() * tensor.element_size()  # of one element in 0-d
    whole = row_bytes and row_bytes % 4 == 0
    return flat.view(torch.int32).view(-1, row_bytes // 4) if whole else flat.view(torch.int32).view(1, -1)
