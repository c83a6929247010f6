"""Checksums of tensors' bytes, computed on the device, to compare tensors that were sent with those that arrived.

A tensor is read as 32-bit words in a matrix [R, C]. Word (r, c) is multiplied by the odd key 2 (r + c P) + 1, where P
is `COLUMN_STEP`, and all products are summed modulo 2**64. Each key is odd, and an odd number has an inverse modulo
2**64, so changing any one word always changes the sum. Keys differ between positions, so exchanging words, rows or
whole tensors changes it, too, except by a coincidence of 2**-32 or rarer. A checksum protects against mistakes, not
against an adversary.

Checksums are cheap for two reasons. A key is a number for the row plus a number for the column, so most of the work
is two plain sums of the words, by row and by column:

    sum_rc w_rc (2r + 1 + 2cP)  =  sum_r (2r + 1) (sum_c w_rc)  +  sum_c 2cP (sum_r w_rc)

And they are linear: those of a tensor's parts, each with its `first_row`, add up to that of the whole tensor.

On a GPU a kernel reads many tensors in one launch (kernels/checksum_kernels.py). On CPU tensors of one shape are
summed together. Hosts without a GPU may have no Triton, so the kernels are imported where they are called.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial

import torch

from trl_fp8.quantization.formats import COLUMN_STEP


# Words summed at once. A cast makes a copy, and integer sums on CPU make one, too: parts of this size keep them small
_WORDS_AT_ONCE = 2**18


def digest(tensor: torch.Tensor, dtype: torch.dtype | None = None, first_row: int = 0) -> torch.Tensor:
    """Return the checksum of a tensor, int64 and 0-d, on the tensor's device.

    The checksum depends on the bytes and on the length of a row (the last dim), but neither on the dtype nor on the
    shape of leading dims. The tensor may have any strides. It is cast to `dtype` first unless that is None, and padded
    with zeros to whole words. If the tensor is part of a larger one, `first_row` is the number of its first row there.
    """
    dtype = dtype or tensor.dtype
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part, row in _parts(tensor.detach(), dtype):
        total += _sums(_words(part.to(dtype)[None]), first_row + row)[0]
    return total


def digests(stacked: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Return the `digest` of each of G stacked tensors, int64 `[G]`. It copies them: use it for a few MiB in all."""
    return _sums(_words(stacked), first_row)


class Table:
    """Tensors on one device that stay where they are while their checksums are computed again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._rest = [tensor.detach() for tensor in tensors]  # tensors that are not in `_table`: `sums` copies them
        self._table = None  # pointers to the GPU tensors that a kernel can read as words
        if tensors and tensors[0].is_cuda:
            from trl_fp8.quantization.kernels.checksum_kernels import table_of

            in_table = [index for index, tensor in enumerate(tensors) if _holds_words(tensor)]
            outside = [index for index, tensor in enumerate(tensors) if not _holds_words(tensor)]
            if in_table:
                self._table = table_of([self._rest[index] for index in in_table])
            self._rest = [self._rest[index] for index in outside]
            # `sums` computes in the order `in_table + outside`; these indices restore the order of `tensors`
            self._places = torch.tensor(in_table + outside).argsort().to(tensors[0].device)

    def sums(self) -> torch.Tensor:
        """Return the `digest` of each tensor's current bytes, int64 `[n]` on the device."""
        rest = torch.zeros(len(self._rest), dtype=torch.int64, device=self._rest[0].device if self._rest else None)
        _fill(rest, self._rest, lambda batch, row: _sums(_words(batch), row))
        if self._table is None:
            return rest
        from trl_fp8.quantization.kernels.checksum_kernels import sum_table

        sums = sum_table(self._table)
        return torch.cat([sums, rest])[self._places] if self._rest else sums


def _holds_words(tensor: torch.Tensor) -> bool:
    """Return whether each row consists of whole words of 4 bytes and begins at the address of a word."""
    size = tensor.element_size()
    return size % 4 == 0 or (tensor.shape[-1:].numel() * size % 4 == 0 and tensor.data_ptr() % 4 == 0)


def digests_of_sent(
    tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast each tensor to its dtype. Return the digests `[n]`, int64, of the results, and whether each is finite."""
    if tensors and tensors[0].is_cuda and all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        from trl_fp8.quantization.kernels.checksum_kernels import sum_sent

        sums, bad = sum_sent([tensor.detach() for tensor in tensors], dtypes)
        return sums, bad == 0
    results = torch.zeros(len(tensors), 2, dtype=torch.int64, device=tensors[0].device if tensors else None)
    for dtype in dict.fromkeys(dtypes):
        members = [index for index, wanted in enumerate(dtypes) if wanted == dtype]
        rows = torch.zeros(len(members), 2, dtype=torch.int64, device=results.device)
        _fill(rows, [tensors[index].detach() for index in members], partial(_sum_sent, dtype), dtype)
        results[members] = rows
    return results[:, 0], results[:, 1] == 0


def _sum_sent(dtype: torch.dtype, batch: torch.Tensor, row: int) -> torch.Tensor:
    """Cast G stacked tensors to `dtype`. Return int64 `[G, 2]`: checksum, and a number that is 0 if all is finite."""
    batch = batch.to(dtype).contiguous()
    flat = batch.view(len(batch), batch.shape[1:].numel())
    bad = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
    if dtype.itemsize == 1 and batch.is_floating_point():  # e4m3 has no infinity, and torch cannot order it
        bad = flat.isnan().sum(1)
    elif batch.is_floating_point() and flat.shape[1]:
        # NaN and infinity make an extreme (amax or amin) not finite. A norm takes 15 times as long on CPU
        bad = torch.stack([flat.amax(1), flat.amin(1)]).isfinite().logical_not().sum(0)
    return torch.stack([_sums(_words(batch), row), bad], 1)


def _fill(
    rows: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    compute: Callable[[torch.Tensor, int], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Add `compute` of tensor i to row i of `rows`, which the caller has set to zero.

    `compute` gets a stack of tensors of one shape and 0, or a part of a large tensor and the number of its first row.
    Results of parts add up. If `compute` casts, it casts to `dtype`: parts must be whole words after the cast.
    """
    words = [max(tensor.nbytes // 4, 1) for tensor in tensors]
    for batch in same_kinds([(t.dtype, *t.shape) for t in tensors], [_WORDS_AT_ONCE // count for count in words]):
        first = tensors[batch[0]]
        if words[batch[0]] > _WORDS_AT_ONCE:
            for part, row in _parts(first, dtype or first.dtype):
                rows[batch[0]] += compute(part[None], row)[0]
        else:
            rows[batch] = compute(torch.stack([tensors[number] for number in batch]), 0)


def same_kinds(kinds: Sequence[Hashable], limits: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of indices whose `kinds` are equal. A batch has at most max(1, limit) indices.

    Callers stack small tensors of one shape, because on CPU a call of an operation takes longer than its work on a
    small tensor.
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
    wide = words.long()  # converted once, because each sum would convert by itself, and more slowly
    by_row, by_column = wide.sum(2), wide.sum(1)
    return by_row @ _row_keys(first_row, words.shape[1]) + by_column @ _column_keys(words.shape[2])


@lru_cache(256)
def _row_keys(first: int, count: int) -> torch.Tensor:
    return 2 * torch.arange(first, first + count) + 1


@lru_cache(256)
def _column_keys(count: int) -> torch.Tensor:
    return 2 * COLUMN_STEP * torch.arange(count)  # wraps modulo 2**64, as the products do


def _parts(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield parts of about `_WORDS_AT_ONCE` words along the first dim, and the number of each part's first row in the
    matrix of words. A tensor is one part if its rows do not consist of whole words.
    """
    if tensor.dim() < 2 or not tensor.numel() or tensor.shape[-1] * dtype.itemsize % 4:
        yield tensor, 0
        return
    rows = tensor[0].numel() // tensor.shape[-1]
    count = max(1, _WORDS_AT_ONCE // (tensor[0].numel() * dtype.itemsize // 4))
    for number, part in enumerate(tensor.split(count)):
        yield part, number * count * rows


def _words(tensors: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `[G, ...]` as words `[G, R, C]`, int32. The last dim is a row if it consists of whole
    words; otherwise all bytes are one row.
    """
    flat = tensors.contiguous().view(len(tensors), tensors.shape[1:].numel()).view(torch.uint8)
    row_bytes = tensors.shape[1:][-1:].numel() * tensors.element_size()  # a 0-d tensor is a row of one element
    if flat.shape[1] % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 4))
    words = flat.view(torch.int32)
    whole = row_bytes and row_bytes % 4 == 0
    return words.view(len(tensors), -1, row_bytes // 4) if whole else words.view(len(tensors), 1, -1)
