"""Checksums of tensors' bytes that stay on the device, for comparing what was sent with what arrived.

A tensor is read as 32-bit words in a matrix [R, C]. Word (r, c) is multiplied by the odd key 2 (r + c P) + 1, where P
is `COLUMN_STEP`, and all products are summed modulo 2**64. Each key is odd, and an odd number has an inverse modulo
2**64: changing any one word always changes the sum. Keys differ between positions: exchanging words, rows or whole
tensors changes it too, except by a coincidence of 2**-32 or rarer. It protects against mistakes, not an adversary.

Two properties make it cheap. Keys are a number of the row plus a number of the column, so that two plain sums over the
bytes, by row and by column, are all the work: sum w (2r + 1 + 2cP) = sum_r (2r + 1) sum_c w + sum_c 2cP sum_r w. And
sums are linear: those of parts, each with its `first_row`, add up to that of the whole.

On a GPU a kernel reads many tensors in one launch (kernels/checksum_kernels.py); on CPU those of one shape are summed
together. Hosts without a GPU may have no Triton, so that the kernels are imported where they are called.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from trl_fp8.quantization.formats import COLUMN_STEP

from .batches import in_batches, places


_PART = 2**18  # words that are looked at together: a cast, and what integer sums copy on CPU, stay small


def digest(tensor: torch.Tensor, dtype: torch.dtype | None = None, first_row: int = 0) -> torch.Tensor:
    """int64 0-d checksum on `tensor`'s device, of its bytes and their positions (not of its dtype or shape).

    Takes any strides, casts to `dtype` first if one is given, and pads the last word with zeros. `first_row` is the
    row that the tensor's first one has in a larger tensor of which it is a part.
    """
    dtype, total = dtype or tensor.dtype, torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part, row in _parts(tensor.detach(), dtype):
        total += _sums(_words(part.to(dtype)[None]), first_row + row)[0]
    return total


def digests(stacked: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """int64 `[G]`: `digest` of each of `[G, ...]`, of a few MiB in all."""
    return _sums(_words(stacked), first_row)


class Table:
    """Tensors of one device that stay where they are, whose checksums are taken again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._rest = [tensor.detach() for tensor in tensors]  # what is stacked, and padded, each time
        self._table = None
        if tensors and tensors[0].is_cuda:
            from trl_fp8.quantization.kernels.checksum_kernels import table_of

            order = sorted(range(len(tensors)), key=lambda index: not _holds_words(tensors[index]))
            in_table = sum(map(_holds_words, tensors))
            self._table = table_of([self._rest[index] for index in order[:in_table]]) if in_table else None
            self._rest = [self._rest[index] for index in order[in_table:]]
            self._places = torch.tensor(places(order)).to(tensors[0].device)

    def sums(self) -> torch.Tensor:
        """int64 `[n]` on the device: `digest` of each tensor as it is now."""
        rest = _looked_at(self._rest, lambda batch, row: _sums(_words(batch), row))
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
        found[members] = _looked_at([tensors[index].detach() for index in members], _sent_as(dtype), dtype)
    return found[:, 0], found[:, 1] == 0


def _sent_as(dtype: torch.dtype) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Checksum of each of `[G, ...]` in `dtype`, and a number that is 0 if all of it is finite: `[G, 2]`."""

    def looked_at(batch: torch.Tensor, row: int) -> torch.Tensor:
        batch = batch.to(dtype).contiguous()
        flat = batch.view(len(batch), batch.shape[1:].numel())
        bad = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
        if dtype.itemsize == 1 and batch.is_floating_point():  # e4m3 has no infinity, and torch no order of it
            bad = flat.isnan().sum(1)
        elif batch.is_floating_point() and flat.shape[1]:
            # NaN and infinity show in the extremes, whichever element they are. In a norm they would, too, but that
            # takes 15 times as long on CPU
            bad = torch.stack([flat.amax(1), flat.amin(1)]).isfinite().logical_not().sum(0)
        return torch.stack([_sums(_words(batch), row), bad], 1)

    return looked_at


def _looked_at(
    tensors: Sequence[torch.Tensor],
    look: Callable[[torch.Tensor, int], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `look` of each tensor, in order. It gets stacks of one shape, or parts of one tensor with their first
    row, whose results are added up. `dtype` is that of the words, if `look` casts.
    """
    words = [max(tensor.nbytes // 4, 1) for tensor in tensors]

    def looked_at(batch: list[int]) -> torch.Tensor:
        first = tensors[batch[0]]
        if len(batch) == 1 and words[batch[0]] > _PART:
            return sum(look(part[None], row) for part, row in _parts(first, dtype or first.dtype))
        return look(torch.stack([tensors[number] for number in batch]), 0)

    return in_batches([(t.dtype, *t.shape) for t in tensors], lambda number: _PART // words[number], looked_at)


def _sums(words: torch.Tensor, first_row: int) -> torch.Tensor:
    """Checksums `[G]` of int32 words `[G, R, C]`."""
    if words.is_cuda:
        from trl_fp8.quantization.kernels.checksum_kernels import sum_table, table_of

        return sum_table(table_of(list(words), first_row=first_row))
    wide = words.long()  # each sum would make its own, more slowly
    by_row, by_column = wide.sum(2), wide.sum(1)
    return by_row @ _row_keys(first_row, words.shape[1]) + by_column @ _column_keys(words.shape[2])


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


def _words(tensors: torch.Tensor) -> torch.Tensor:
    """The bytes of `[G, ...]` as int32 `[G, R, C]`; `C` spans the last dim if that is a whole number of words."""
    flat = tensors.contiguous().view(len(tensors), tensors.shape[1:].numel()).view(torch.uint8)
    row_bytes = tensors.shape[1:][-1:].numel() * tensors.element_size()  # of one element in 0-d
    if flat.shape[1] % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 4))
    words = flat.view(torch.int32)
    whole = row_bytes and row_bytes % 4 == 0
    return words.view(len(tensors), -1, row_bytes // 4) if whole else words.view(len(tensors), 1, -1)
