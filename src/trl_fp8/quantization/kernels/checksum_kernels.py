"""Triton kernels for checksums (see codec/digest.py) of many tensors in one launch, over a table of pointers.

    table_of     builds a table of tensors; one table serves as long as the tensors stay in place
    sum_table    returns the checksums of the tensors' current bytes, by one launch of `_sum_entries`
    sum_sent     casts unquantized tensors as a sync does, and returns the checksums of the results

A sync compares checksums of hundreds of tensors, most of a few KiB. With one launch for each tensor the host would
take longer than the device. Here all tensors take one launch, in which a program sums up to 128 KiB of one tensor.

A table (`Pointers`) has an *entry* for each tensor, `FIELDS` integers (see `_entry` and `_table`). It also has an
int32 map with an element for each program (1/32768 of the bytes): the entry that the program works on. So a program
finds its tensor by one load; a search among the tensors would be a chain of ten loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trl_fp8.quantization import formats


LANES = 256  # elements that a program loads in one step, one per thread: part of one row, or several short rows
STEPS = 128  # steps of a program. A step reads `LANES // width` rows, and the next step the rows below
AT_ONCE = 8  # number of steps whose loads are under way together
COLUMN_STEP = tl.constexpr(formats.COLUMN_STEP)
FIELDS = tl.constexpr(10)  # integers of an entry
_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Pointers:
    """Device addresses of tensors. It keeps references to the tensors, so that their memory is not reused."""

    tensors: tuple[torch.Tensor, ...]
    entries: torch.Tensor  # int64 `[n, FIELDS]`
    programs: torch.Tensor  # int32 `[programs]`: the entry that each program works on


def table_of(tensors: Sequence[torch.Tensor], *, first_row: int = 0) -> Pointers:
    """Return the table of one or more tensors, all on one device, of any dtype and any number of dims.

    A row of a dtype of less than 4 bytes must be contiguous and consist of whole words (4 bytes). Leading dims may
    step through memory in up to two strides, as the rows of a slice of experts do. If the tensors are parts of larger
    ones, `first_row` is the number of rows before each part.

    Raises:
        ValueError: The rows or strides of a tensor are not as described; the message says which.
    """
    words = [_words(tensor) for tensor in tensors]
    return _table(tensors, elements=words, slots=range(len(tensors)), first_row=first_row)


def sum_table(table: Pointers) -> torch.Tensor:
    """Return the checksum of each tensor's current bytes, int64 `[n]`. One launch; the host does not wait."""
    sums = torch.zeros(len(table.tensors), dtype=torch.int64, device=table.entries.device)
    _launch(table, sums, bad=None, source=tl.int32, target=tl.int32)
    return sums


def sum_sent(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast unquantized `tensors` to `dtypes` in registers. Return their checksums, and which are not finite.

    Args:
        tensors: One or more, all on one device, in BF16, FP16 or FP32. Strides as for `table_of`, except that the last
            dim may have gaps.
        dtypes: The dtype in which the engine holds each tensor: BF16, FP16 or FP32.

    Returns:
        Checksums, int64 `[n]`, equal to `digest(tensor, dtype)` if the tensor is finite, and flags, int64 `[n]`: 1 if
        any element is NaN or infinite after the cast. One launch for each pair of dtypes.

    Raises:
        ValueError: A tensor or dtype is not as described, or a tensor with several rows has rows that are no whole
            number of words after the cast.
    """
    sums, bad = torch.zeros(2, len(tensors), dtype=torch.int64, device=tensors[0].device)
    # (dtype of a tensor, dtype in the engine) -> slots, that is, places in `tensors` and in the result
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for slot, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if tensor.dtype not in _TRITON_TYPES or dtype not in _TRITON_TYPES:
            raise ValueError(f"a tensor in {tensor.dtype} cannot be sent as {dtype}: expected BF16, FP16 or FP32.")
        kinds.setdefault((tensor.dtype, dtype), []).append(slot)
    for (source, target), slots in kinds.items():
        chosen = [tensors[slot].detach() for slot in slots]
        for tensor in chosen:
            has_several_rows = tensor.dim() > 1 and tensor.numel() > tensor.shape[-1]
            if has_several_rows and tensor.shape[-1] * target.itemsize % 4:
                raise ValueError(f"rows of shape {tuple(tensor.shape)} are no whole number of words in {target}.")
        table = _table(chosen, elements=chosen, slots=slots)
        _launch(table, sums, bad=bad, source=_TRITON_TYPES[source], target=_TRITON_TYPES[target])
    return sums, bad


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` as int32 words."""
    tensor = tensor.detach()
    if tensor.element_size() == 4:
        return tensor.view(torch.int32)
    if tensor.data_ptr() % 4:
        raise ValueError(f"{_described(tensor)} does not begin at a word of 4 bytes.")
    at_least_1d = tensor if tensor.dim() else tensor.view(1)
    try:
        return at_least_1d.view(torch.int32)
    except RuntimeError as error:
        raise ValueError(f"{_described(tensor)} has rows that are no whole number of words: {error}") from error


def _table(
    tensors: Sequence[torch.Tensor], elements: Sequence[torch.Tensor], slots: Sequence[int], first_row: int = 0
) -> Pointers:
    """Return the table of `tensors`.

    Args:
        elements: The tensors as the kernel reads them.
        slots: For each tensor the place of its checksum in the result.
    """
    entries: list[list[int]] = []
    program_counts: list[int] = []  # number of programs for each entry
    first_program = 0
    for tensor, slot in zip(elements, slots, strict=True):
        entry, count = _entry(tensor)
        entries.append([*entry, first_row, first_program, slot])
        program_counts.append(count)
        first_program += count
    pinned = torch.cuda.is_available()  # a copy from pageable memory may make the host wait for the device
    entries_on_host = torch.tensor(entries, dtype=torch.int64, pin_memory=pinned)
    counts_on_host = torch.tensor(program_counts, pin_memory=pinned)
    device = tensors[0].device
    counts = counts_on_host.to(device, non_blocking=True)
    entry_numbers = torch.arange(len(entries), dtype=torch.int32, device=device)
    # `first_program` is now the number of all programs. With it as `output_size` torch need not wait for the counts
    programs = entry_numbers.repeat_interleave(counts, output_size=first_program)
    return Pointers(tuple(tensors), entries_on_host.to(device, non_blocking=True), programs)


def _entry(tensor: torch.Tensor) -> tuple[list[int], int]:
    """Return the first seven fields of an entry, and the number of programs that it needs. Strides are in elements."""
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))  # (size, stride) of each dim
    if not dims:
        dims = [(1, 1)]
    columns, column_stride = dims.pop()
    # Merge leading dims that one stride steps through
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        elif size != 1:
            merged.append((size, stride))
    if len(merged) > 2 and tensor.numel():
        raise ValueError(f"{_described(tensor)} has leading dims that step through memory in more than two strides.")
    while len(merged) < 2:  # the kernel steps through matrices and rows: a missing dim has one element
        merged.insert(0, (1, 0))
    matrices, matrix_stride = merged[-2]
    rows, row_stride = merged[-1]
    width = min(triton.next_power_of_2(max(columns, 1)), LANES)
    across = triton.cdiv(columns, width)  # programs beside each other
    strips = triton.cdiv(rows, LANES // width * STEPS)  # programs one below another in a matrix
    programs = matrices * strips * across if tensor.numel() else 0
    return [tensor.data_ptr(), rows, columns, matrix_stride, row_stride, column_stride, width], programs


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} and dtype {tensor.dtype}"


def _launch(table: Pointers, sums: torch.Tensor, bad: torch.Tensor | None, source: tl.dtype, target: tl.dtype) -> None:
    if len(table.programs) == 0:
        return
    grid = (len(table.programs),)
    constants = {"SOURCE": source, "TARGET": target, "LANES": LANES, "STEPS": STEPS, "AT_ONCE": AT_ONCE}
    with torch.cuda.device_of(table.programs):
        _sum_entries[grid](table.entries, table.programs, sums, bad, **constants, num_warps=LANES // 32)


@triton.jit
def _sum_entries(
    entries,
    programs,
    sums,
    bad,
    SOURCE: tl.constexpr,  # dtype of the tensor
    TARGET: tl.constexpr,  # dtype that it is cast to before it is summed up
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

    # Programs of a tensor are numbered by matrix, then by strip (the rows of a program), then across the columns
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

    # Word j of row r has the key 2 (r + j COLUMN_STEP) + 1. A lane stays in its column, and its row rises by `height`
    # with each step. So the checksum of the words w of a lane is
    #     sum of w key = (key in the lane's first row) * (sum of w) + 2 height * (sum of w step)
    # The loop adds up only the two sums on the right. 64-bit products, each several instructions on a GPU, follow once
    # after the loop
    plain, by_step = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64)
    largest = tl.zeros([LANES], tl.int32)
    for begin in range(0, (rows_left + height - 1) // height, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):  # unrolled: all of the loads are under way before the first is used
            step = begin + ahead
            value = tl.load(place + step * height * row_stride, mask=step * height < lane_rows, other=0)
            if TARGET.primitive_bitwidth == 16:
                half = value.to(TARGET).to(tl.int16, bitcast=True).to(tl.int32)
                largest = tl.maximum(largest, half & 0x7FFF)
                # Two lanes have the two halves of a word. Each lane adds its half as a word whose other half is zero
                word = tl.where(column % 2 == 0, half & 0xFFFF, half << 16)
            else:
                word = value.to(TARGET).to(tl.int32, bitcast=True)
                largest = tl.maximum(largest, word & 0x7FFFFFFF)
            plain += word
            by_step += word.to(tl.int64) * step
    key = 2 * (first_row + matrix * rows + first + row + column * TARGET.primitive_bitwidth // 32 * COLUMN_STEP) + 1
    tl.atomic_add(sums + slot, tl.sum(plain * key + by_step * (2 * height), axis=0), sem="relaxed")
    if bad is not None:
        # Without the sign bit, infinity has the smallest bits of all numbers that are not finite
        infinity: tl.constexpr = 0x7F80 if TARGET == tl.bfloat16 else 0x7C00 if TARGET == tl.float16 else 0x7F800000
        tl.store(bad + slot, 1, mask=tl.max(largest, axis=0) >= infinity)
