"""Checksums of tensors' bytes that stay on the device, for comparing what was sent with what arrived.

A tensor is read as 32-bit words in a matrix [R, C]. Word (r, c) is multiplied by the odd key 2 (r + c P) + 1, where P
is `COLUMN_STEP`, and all products are summed modulo 2**64. Each key is odd, and an odd number has an inverse modulo
2**64: changing any one word always changes the sum. Keys differ between positions: exchanging words, rows or whole
tensors changes it too, except by a coincidence of 2**-32 or rarer. It protects against mistakes, not an adversary.

Two properties make it cheap. A key is a number of the row plus a number of the column, so two plain sums of the
words, by row and by column, are all the work:

    sum_rc w_rc (2r + 1 + 2cP)  =  sum_r (2r + 1) (sum_c w_rc)  +  sum_c 2cP (sum_r w_rc)

And sums are linear: those of parts, each with its `first_row`, add up to that of the whole.

On a GPU a kernel reads many tensors in one launch (kernels/checksum_kernels.py); on CPU those of one shape are summed
together. Hosts without a GPU may have no Triton, so the kernels are imported where they are called.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial

import torch

from trl_fp8.quantization.formats import COLUMN_STEP


_PART = 2**18  # words summed at once, so that a cast, and the copies that integer sums make on CPU, stay small


def digest(tensor: torch.Tensor, dtype: torch.dtype | None = None, first_row: int = 0) -> torch.Tensor:
    """Return an int64 0-d checksum, on the device, of a tensor's bytes and the length of its rows (the last dim).

    Dtype and leading dims do not count.

    The tensor has any strides, is cast to `dtype` first unless that is None, and is padded with zeros to whole words.
    `first_row` is the row at which it begins in the larger tensor that it is a part of.
    """
    dtype, total = dtype or tensor.dtype, torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part, row in _parts(tensor.detach(), dtype):
        total += _sums(_words(part.to(dtype)[None]), first_row + row)[0]
    return total


def digests(stacked: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Return `digest` of each of `[G, ...]`, a few MiB in all, as int64 `[G]`."""
    return _sums(_words(stacked), first_row)


class Table:
    """Tensors on one device that stay in place while their checksums are computed again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._rest = [tensor.detach() for tensor in tensors]  # stacked and padded in each call
        self._table = None
        if tensors and tensors[0].is_cuda:
            from trl_fp8.quantization.kernels.checksum_kernels import table_of

            order = sorted(range(len(tensors)), key=lambda index: not _holds_words(tensors[index]))
            in_table = sum(map(_holds_words, tensors))
            self._table = table_of([self._rest[index] for index in order[:in_table]]) if in_table else None
            self._rest = [self._rest[index] for index in order[in_table:]]
            places = sorted(range(len(order)), key=order.__getitem__)  # the inverse permutation
            self._places = torch.tensor(places).to(tensors[0].device)

    def sums(self) -> torch.Tensor:
        """Return `digest` of each tensor as it is now, int64 `[n]` on the device."""
        rest = torch.zeros(len(self._rest), dtype=torch.int64, device=self._rest[0].device if self._rest else None)
        _fill(rest, self._rest, lambda batch, row: _sums(_words(batch), row))
        if self._table is None:
            return rest
        from trl_fp8.quantization.kernels.checksum_kernels import sum_table

        sums = sum_table(self._table)
        return torch.cat([sums, rest])[self._places] if self._rest else sums


def _holds_words(tensor: torch.Tensor) -> bool:
    """Return whether each row consists of whole words of 4 bytes and begins at one."""
    size = tensor.element_size()
    return size % 4 == 0 or (tensor.shape[-1:].numel() * size % 4 == 0 and tensor.data_ptr() % 4 == 0)


def digests_of_sent(
    tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each tensor's `digest` after a cast to its dtype, int64 `[n]`, and whether it is finite, bool `[n]`."""
    if tensors and tensors[0].is_cuda and all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        from trl_fp8.quantization.kernels.checksum_kernels import sum_sent

        sums, bad = sum_sent([tensor.detach() for tensor in tensors], dtypes)
        return sums, bad == 0
    found = torch.zeros(len(tensors), 2, dtype=torch.int64, device=tensors[0].device if tensors else None)
    for dtype in dict.fromkeys(dtypes):
        members = [index for index, wanted in enumerate(dtypes) if wanted == dtype]
        rows = torch.zeros(len(members), 2, dtype=torch.int64, device=found.device)
        _fill(rows, [tensors[index].detach() for index in members], partial(_sum_sent, dtype), dtype)
        found[members] = rows
    return found[:, 0], found[:, 1] == 0


def _sum_sent(dtype: torch.dtype, batch: torch.Tensor, row: int) -> torch.Tensor:
    """Cast each of `[G, ...]` to `dtype`. Return int64 `[G, 2]`: its checksum, and 0 if all of it is finite."""
    batch = batch.to(dtype).contiguous()
    flat = batch.view(len(batch), batch.shape[1:].numel())
    bad = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
    if dtype.itemsize == 1 and batch.is_floating_point():  # e4m3 has no infinity, and torch cannot order it
        bad = flat.isnan().sum(1)
    elif batch.is_floating_point() and flat.shape[1]:
        # NaN and infinity show in the extremes. A norm would show them, too, but takes 15 times as long on CPU
        bad = torch.stack([flat.amax(1), flat.amin(1)]).isfinite().logical_not().sum(0)
    return torch.stack([_sums(_words(batch), row), bad], 1)


def _fill(
    rows: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    compute: Callable[[torch.Tensor, int], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Put `compute` of each tensor into its row of `rows`, which are zero before.

    `compute` gets a stack of tensors of one shape, or a part of a large one with its first row: results of parts are
    added up. `dtype` is what `compute` casts to, if it casts: parts are cut at whole words of it.
    """
    words = [max(tensor.nbytes // 4, 1) for tensor in tensors]
    for batch in same_kinds([(t.dtype, *t.shape) for t in tensors], [_PART // count for count in words]):
        first = tensors[batch[0]]
        if words[batch[0]] > _PART:
            for part, row in _parts(first, dtype or first.dtype):
                rows[batch[0]] += compute(part[None], row)[0]
        else:
            rows[batch] = compute(torch.stack([tensors[number] for number in batch]), 0)


def same_kinds(kinds: Sequence[Hashable], limits: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of equal `kinds` in batches of at most `limits[index]`, or of one.

    Small tensors of one shape are stacked: on CPU a call of an operation costs more than its work on one of them.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    for group in groups.values():
        count = max(1, limits[group[0]])
        for start in range(0, len(group), count):
            yield group[start : start + count]


def _sums(words: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return the checksums `[G]` of int32 words `[G, R, C]`."""
    if words.is_cuda:
        from trl_fp8.quantization.kernels.checksum_kernels import sum_table, table_of

        return sum_table(table_of(list(words), first_row=first_row))
    wide = words.long()  # once: each sum would convert by itself, more slowly
    by_row, by_column = wide.sum(2), wide.sum(1)
    return by_row @ _row_keys(first_row, words.shape[1]) + by_column @ _column_keys(words.shape[2])


@lru_cache(256)
def _row_keys(first: int, count: int) -> torch.Tensor:
    return 2 * torch.arange(first, first + count) + 1


@lru_cache(256)
def _column_keys(count: int) -> torch.Tensor:
    return 2 * COLUMN_STEP * torch.arange(count)  # wraps modulo 2**64, as do the products


def _parts(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield parts along the first dim of about `_PART` words, and their first rows in the matrix of words.

    A tensor whose rows are no whole number of words is one part.
    """
    if tensor.dim() < 2 or not tensor.numel() or tensor.shape[-1] * dtype.itemsize % 4:
        yield tensor, 0
        return
    rows = tensor[0].numel() // tensor.shape[-1]
    count = max(1, _PART // (tensor[0].numel() * dtype.itemsize // 4))
    for number, part in enumerate(tensor.split(count)):
        yield part, number * count * rows


def _words(tensors: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `[G, ...]` as int32 `[G, R, C]`; `C` is the last dim, if that has whole words."""
    flat = tensors.contiguous().view(len(tensors), tensors.shape[1:].numel()).view(torch.uint8)
    row_bytes = tensors.shape[1:][-1:].numel() * tensors.element_size()  # of one element in 0-d
    if flat.shape[1] % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 4))
    words = flat.view(torch.int32)
    whole = row_bytes and row_bytes % 4 == 0
    return words.view(len(tensors), -1, row_bytes // 4) if whole else words.view(len(tensors), 1, -1)
