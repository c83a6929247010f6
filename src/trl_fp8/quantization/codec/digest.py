"""Checksums of tensors' bytes, computed on the device, to compare tensors that were sent with those that arrived.

A tensor is read as 32-bit words in a matrix [R, C]. Word (r, c) is multiplied by the odd key 2 (r + c P) + 1, where P
is `COLUMN_STEP`, and all products are summed modulo 2**64. Each key is odd, and an odd number has an inverse modulo
2**64, so changing any one word always changes the sum. Keys differ between positions, so exchanging words, rows or
whole tensors changes the sum, too; the probability that it does not is at most about 2**-32. A checksum protects
against mistakes, not against an adversary.

Checksums are cheap for two reasons. First, a key is the row's number 2r + 1 plus the column's number 2cP. So most of
the work is to add words without multiplying them, along each row and along each column (w_rc is a word):

    sum_rc w_rc (2r + 1 + 2cP)  =  sum_r (2r + 1) (sum_c w_rc)  +  sum_c 2cP (sum_r w_rc)

Second, a tensor can be summed in parts. The checksums of its rows 0 to 99 and of its rows 100 to the end add up to its
checksum, if the keys of the second part begin with row 100 (`first_row`).

On a GPU a kernel reads many tensors in one launch (kernels/checksum_kernels.py). On CPU tensors of one shape are
summed together. Hosts without a GPU may have no Triton, so the kernels are imported where they are called.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial

import torch

from trl_fp8.quantization.formats import COLUMN_STEP


# Words summed at once. A cast copies its input, and so does an integer sum on CPU: such parts keep the copies small
_WORDS_AT_ONCE = 2**18


def digest(tensor: torch.Tensor, dtype: torch.dtype | None = None, first_row: int = 0) -> torch.Tensor:
    """Return the checksum of a tensor, int64 and 0-d, on the tensor's device.

    The checksum depends on the bytes and on the length of a row (the last dim), but neither on the dtype nor on the
    shape of leading dims. The tensor may have any strides. It is cast to `dtype` first unless that is None, and padded
    with zeros to whole words. If the tensor is part of a larger one, `first_row` is the number of its first row there.
    """
    dtype = dtype or tensor.dtype
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part, row_of_part in _parts(tensor.detach(), dtype):
        stack_of_one = part.to(dtype)[None]
        total += digests(stack_of_one, first_row + row_of_part)[0]
    return total


def digests(stacked: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Return the `digest` of each of G stacked tensors, int64 `[G]`. It copies them: use it for a few MiB in all."""
    return _sums(_words(stacked), first_row)


class Table:
    """Tensors on one device that stay where they are while their checksums are computed again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        tensors = [tensor.detach() for tensor in tensors]
        self._table = None  # pointers to the GPU tensors that a kernel can read as words
        self._rest = tensors  # all other tensors: `sums` copies them
        if not tensors or not tensors[0].is_cuda:
            return
        from trl_fp8.quantization.kernels.checksum_kernels import table_of

        in_table = [index for index, tensor in enumerate(tensors) if _holds_words(tensor)]
        outside = [index for index, tensor in enumerate(tensors) if not _holds_words(tensor)]
        if in_table:
            self._table = table_of([tensors[index] for index in in_table])
        self._rest = [tensors[index] for index in outside]
        # `sums` computes in the order `in_table + outside`; these indices restore the order of `tensors`
        self._places = torch.tensor(in_table + outside).argsort().to(tensors[0].device)

    def sums(self) -> torch.Tensor:
        """Return the `digest` of each tensor's current bytes, int64 `[n]` on the device."""
        device = self._rest[0].device if self._rest else None
        sums_of_rest = torch.zeros(len(self._rest), dtype=torch.int64, device=device)
        _fill(sums_of_rest, self._rest, digests)
        if self._table is None:
            return sums_of_rest
        from trl_fp8.quantization.kernels.checksum_kernels import sum_table

        sums_of_table = sum_table(self._table)
        if not self._rest:
            return sums_of_table
        return torch.cat([sums_of_table, sums_of_rest])[self._places]


def _holds_words(tensor: torch.Tensor) -> bool:
    """Return whether each row consists of whole words of 4 bytes and begins at the address of a word."""
    if tensor.element_size() % 4 == 0:
        return True
    return _row_bytes(tensor) % 4 == 0 and tensor.data_ptr() % 4 == 0


def _row_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a row. A 0-d tensor is a row of one element."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    return columns * tensor.element_size()


def digests_of_sent(
    tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast each tensor to its dtype. Return the digests `[n]`, int64, of the results, and whether each is finite."""
    # The kernel casts to BF16, FP16 and FP32, not to FP8 or integers
    if tensors and tensors[0].is_cuda and all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        from trl_fp8.quantization.kernels.checksum_kernels import sum_sent

        sums, bad = sum_sent([tensor.detach() for tensor in tensors], dtypes)
        return sums, bad == 0
    results = torch.zeros(len(tensors), 2, dtype=torch.int64, device=tensors[0].device if tensors else None)
    indices_by_dtype: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        indices_by_dtype.setdefault(dtype, []).append(index)
    for dtype, indices in indices_by_dtype.items():
        rows = torch.zeros(len(indices), 2, dtype=torch.int64, device=results.device)
        _fill(rows, [tensors[index].detach() for index in indices], partial(_sum_sent, dtype), cast_to=dtype)
        results[indices] = rows
    return results[:, 0], results[:, 1] == 0


def _sum_sent(dtype: torch.dtype, batch: torch.Tensor, first_row: int) -> torch.Tensor:
    """Cast G stacked tensors to `dtype`. Return int64 `[G, 2]`: checksum, and a number that is 0 if all is finite."""
    batch = batch.to(dtype).contiguous()
    flat = batch.view(len(batch), batch.shape[1:].numel())
    bad = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
    if dtype.itemsize == 1 and batch.is_floating_point():  # torch has no amax for e4m3, and e4m3 has no infinity
        bad = flat.isnan().sum(1)
    elif batch.is_floating_point() and flat.shape[1]:
        # NaN and infinity make an extreme (amax or amin) not finite. A norm takes 15 times as long on CPU
        bad = torch.stack([flat.amax(1), flat.amin(1)]).isfinite().logical_not().sum(0)
    return torch.stack([digests(batch, first_row), bad], 1)


def _fill(
    rows: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    compute: Callable[[torch.Tensor, int], torch.Tensor],
    cast_to: torch.dtype | None = None,
) -> None:
    """Write what `compute` returns for tensor i to row i of `rows`, which the caller has set to zero.

    Args:
        compute: Takes G stacked tensors and the number of their first row, and returns G rows. It is called with
            stacks of small tensors of one shape, and with the parts of a large tensor, whose results are added.
        cast_to: The dtype to which `compute` casts, so parts consist of whole words after the cast. None: no cast.
    """
    kinds = [(tensor.dtype, *tensor.shape) for tensor in tensors]
    word_counts = [max(tensor.nbytes // 4, 1) for tensor in tensors]
    for batch in same_kinds(kinds, [_WORDS_AT_ONCE // count for count in word_counts]):
        first = batch[0]
        if word_counts[first] > _WORDS_AT_ONCE:  # a large tensor is a batch of its own
            large = tensors[first]
            for part, row_of_part in _parts(large, cast_to or large.dtype):
                rows[first] += compute(part[None], row_of_part)[0]
        else:
            rows[batch] = compute(torch.stack([tensors[index] for index in batch]), 0)


def same_kinds(kinds: Sequence[Hashable], limits: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of indices whose `kinds` are equal.

    Callers stack small tensors of one shape, because on CPU a call of an operation takes longer than its work on a
    small tensor.

    Args:
        limits: The most indices in a batch, for each index the limit of its kind. 0 means 1.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    for group in groups.values():
        limit = max(1, limits[group[0]])
        for start in range(0, len(group), limit):
            yield group[start : start + limit]


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
    slice_rows = tensor[0].numel() // tensor.shape[-1]  # rows in one slice `tensor[i]`
    slice_words = tensor[0].numel() * dtype.itemsize // 4
    slices = max(1, _WORDS_AT_ONCE // slice_words)  # slices in a part
    for number, part in enumerate(tensor.split(slices)):
        yield part, number * slices * slice_rows


def _words(tensors: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `[G, ...]` as words `[G, R, C]`, int32. The last dim is a row if it consists of whole
    words; otherwise all bytes are one row.
    """
    flat = tensors.contiguous().view(len(tensors), tensors.shape[1:].numel()).view(torch.uint8)
    if flat.shape[1] % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 4))
    words = flat.view(torch.int32)
    row_bytes = _row_bytes(tensors[0])
    if row_bytes > 0 and row_bytes % 4 == 0:
        return words.view(len(tensors), -1, row_bytes // 4)
    return words.view(len(tensors), 1, -1)
