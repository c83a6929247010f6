"""Triton kernels for checksums (see codec/digest.py) of many tensors in one launch, over a table of pointers.

A sync proves hundreds of tensors: with launches of their own, most of which read a few KiB, the host would take longer
than the device. A program sums up 128 KiB of one tensor; an int32 map, 1/32768 of the bytes, tells it which: one load,
where a search among the tensors would be a chain of ten.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trl_fp8.quantization import formats


LANES = 256  # elements that a program loads with one instruction, one per thread: of one row, or of several short ones
STEPS = 128  # of a program, down its columns
AT_ONCE = 8  # steps whose loads are under way together
COLUMN_STEP = tl.constexpr(formats.COLUMN_STEP)
FIELDS = tl.constexpr(10)  # of an entry
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Pointers:
    """Device addresses of tensors. It keeps references to them, so that their memory is not reused."""

    tensors: tuple[torch.Tensor, ...]
    entries: torch.Tensor  # int64 [n, FIELDS], see `_entry`
    programs: torch.Tensor  # int32 [programs]: the entry of each


def table_of(tensors: Sequence[torch.Tensor], *, first_row: int = 0) -> Pointers:
    """Return the table of at least one tensor, all on one device, of any dtype and any dims.

    Rows of dtypes of less than 4 bytes need to be whole words without gaps. Leading dims may step through memory in
    two strides, as do the rows of a slice of experts. `first_row` is the number of rows that come before each tensor
    in the larger one that it is a part of.

    Raises:
        ValueError: A tensor is not such words; the message says why.
    """
    return _table(tensors, [_words(tensor) for tensor in tensors], list(range(len(tensors))), first_row)


def sum_table(table: Pointers) -> torch.Tensor:
    """Return int64 `[n]`, the checksum of each tensor's bytes as they are now. One launch; the host does not wait."""
    sums = torch.zeros(len(table.tensors), dtype=torch.int64, device=table.entries.device)
    _launch(table, sums, None, tl.int32, tl.int32)
    return sums


def sum_sent(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast unquantized `tensors` to `dtypes` in registers. Return their checksums, and which are not finite.

    Args:
        tensors: At least one, all on one device, in BF16, FP16 or FP32. Strides as for `table_of`, but any last dim.
        dtypes: What each is held in: BF16, FP16 or FP32.

    Returns:
        int64 `[n]` checksums, equal to `digest(tensor, dtype)` where that is finite, and int64 `[n]`: 1 where any
        element is NaN or infinite after the cast. One launch for each pair of dtypes.

    Raises:
        ValueError: A tensor or dtype is not as described, or rows of several are no whole number of words after the
            cast.
    """
    sums, bad = torch.zeros(2, len(tensors), dtype=torch.int64, device=tensors[0].device)
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for slot, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if tensor.dtype not in _TYPES or dtype not in _TYPES:
            raise ValueError(f"a tensor in {tensor.dtype} cannot be sent as {dtype}: expected BF16, FP16 or FP32.")
        kinds.setdefault((tensor.dtype, dtype), []).append(slot)
    for (source, target), slots in kinds.items():
        chosen = [tensors[slot].detach() for slot in slots]
        for tensor in chosen:
            if tensor.dim() > 1 and tensor.shape[-1] * target.itemsize % 4 and tensor.numel() > tensor.shape[-1]:
                raise ValueError(f"rows of shape {tuple(tensor.shape)} are no whole number of words in {target}.")
        _launch(_table(chosen, chosen, slots), sums, bad, _TYPES[source], _TYPES[target])
    return sums, bad


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` as int32 words."""
    tensor = tensor.detach()
    if tensor.element_size() == 4:
        return tensor.view(torch.int32)
    if tensor.data_ptr() % 4:
        raise ValueError(f"{_described(tensor)} does not begin at a word of 4 bytes.")
    try:
        return (tensor if tensor.dim() else tensor.view(1)).view(torch.int32)
    except RuntimeError as error:
        raise ValueError(f"{_described(tensor)} has rows that are no whole number of words: {error}") from error


def _table(
    tensors: Sequence[torch.Tensor], elements: Sequence[torch.Tensor], slots: Sequence[int], first_row: int = 0
) -> Pointers:
    entries, programs, taken = [], [], 0
    for tensor, slot in zip(elements, slots, strict=True):
        entry, count = _entry(tensor)
        entries.append([*entry, first_row, taken, slot])
        programs.append(count)
        taken += count
    pinned = torch.cuda.is_available()  # from other memory the host may wait for the device
    on_host = torch.tensor(entries, dtype=torch.int64, pin_memory=pinned)
    counts = torch.tensor(programs, pin_memory=pinned)
    device = tensors[0].device
    owners = torch.arange(len(entries), dtype=torch.int32, device=device)
    owners = owners.repeat_interleave(counts.to(device, non_blocking=True), output_size=taken)
    return Pointers(tuple(tensors), on_host.to(device, non_blocking=True), owners)


def _entry(tensor: torch.Tensor) -> tuple[list[int], int]:
    """Return the first fields of an entry, in elements, and the number of programs that it needs."""
    *lead, (columns, column_stride) = zip(tensor.shape, tensor.stride(), strict=True) if tensor.dim() else [(1, 1)]
    merged: list[tuple[int, int]] = []
    for size, stride in lead:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        elif size != 1:
            merged.append((size, stride))
    if len(merged) > 2 and tensor.numel():
        raise ValueError(f"{_described(tensor)} has leading dims that step through memory in more than two strides.")
    (matrices, matrix_stride), (rows, row_stride) = [(1, 0)] * (2 - len(merged)) + merged[-2:]
    width = min(triton.next_power_of_2(max(columns, 1)), LANES)
    strips = triton.cdiv(rows, LANES // width * STEPS)
    programs = matrices * strips * triton.cdiv(columns, width) if tensor.numel() else 0
    return [tensor.data_ptr(), rows, columns, matrix_stride, row_stride, column_stride, width], programs


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} and dtype {tensor.dtype}"


def _launch(table: Pointers, sums: torch.Tensor, bad: torch.Tensor | None, source: tl.dtype, target: tl.dtype) -> None:
    if len(table.programs):
        with torch.cuda.device_of(table.programs):
            grid = (len(table.programs),)
            constants = {"SOURCE": source, "TARGET": target, "LANES": LANES, "STEPS": STEPS, "AT_ONCE": AT_ONCE}
            _sum_entries[grid](table.entries, table.programs, sums, bad, **constants, num_warps=LANES // 32)


@triton.jit
def _sum_entries(
    entries,
    programs,
    sums,
    bad,
    SOURCE: tl.constexpr,  # dtypes
    TARGET: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    entry = entries + tl.load(programs + tl.program_id(0)).to(tl.int64) * FIELDS
    start = tl.load(entry).to(tl.pointer_type(SOURCE), bitcast=True)
    rows, columns = tl.load(entry + 1), tl.load(entry + 2)
    matrix_stride, row_stride, column_stride = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    width = tl.load(entry + 6).to(tl.int32)  # a power of two
    first_row, first_program, slot = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9)

    height = LANES // width  # rows of a step
    across = (columns + width - 1) // width
    strips = (rows + height * STEPS - 1) // (height * STEPS)
    program = tl.program_id(0) - first_program
    matrix, strip = program // across // strips, program // across % strips
    lane = tl.arange(0, LANES)
    column = program % across * width + (lane & (width - 1))
    row = lane // width
    first = strip * height * STEPS
    rows_left = tl.minimum(rows - first, height * STEPS).to(tl.int32)
    place = start + matrix * matrix_stride + (first + row) * row_stride + column * column_stride
    lane_rows = tl.where(column < columns, rows_left - row, 0)

    # The key of a word is 2 (row + COLUMN_STEP word number) + 1. A lane stays in its column, and its row rises by
    # `height` with each step, so that sum w key = key of its first row * sum w + 2 height * sum w step: the loop adds
    # two sums, and 64-bit products of keys, of which a GPU makes one out of several, are taken once, at the end
    plain, by_step = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64)
    largest = tl.zeros([LANES], tl.int32)
    for begin in range(0, (rows_left + height - 1) // height, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):  # unrolled: all of the loads are under way before the first is used
            step = begin + ahead
            value = tl.load(place + step * height * row_stride, mask=step * height < lane_rows, other=0)
            if TARGET.primitive_bitwidth == 16:
                half = value.to(TARGET).to(tl.int16, bitcast=True).to(tl.int32)
                largest = tl.maximum(largest, half & 0x7FFF)
                # Two elements are one word, and two lanes have them: each adds the word with the other half zero
                word = tl.where(column % 2 == 0, half & 0xFFFF, half << 16)
            else:
                word = value.to(TARGET).to(tl.int32, bitcast=True)
                largest = tl.maximum(largest, word & 0x7FFFFFFF)
            plain += word
            by_step += word.to(tl.int64) * step
    key = 2 * (first_row + matrix * rows + first + row + column * TARGET.primitive_bitwidth // 32 * COLUMN_STEP) + 1
    tl.atomic_add(sums + slot, tl.sum(plain * key + by_step * (2 * height), axis=0), sem="relaxed")
    if bad is not None:
        # Without the sign, infinity is the smallest of the bits that are not finite, NaN above it
        infinity: tl.constexpr = 0x7F80 if TARGET == tl.bfloat16 else 0x7C00 if TARGET == tl.float16 else 0x7F800000
        tl.store(bad + slot, 1, mask=tl.max(largest, axis=0) >= infinity)
