"""Triton kernels that read a tensor once: quantization in blocks, and back.

torch's operations would read and write an fp32 copy half a dozen times, which takes as long as the GEMM that the codes
are for. The results equal those of codec/blockwise.py and codec/digest.py on CPU, byte for byte: sums modulo 2**64 do
not depend on the order of programs.
"""

import math
from functools import cache, partial

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

from trl_fp8.quantization import formats
from trl_fp8.quantization.formats import BLOCK, E4M3_MAX, ScaleFormat


E4M3 = torch.float8_e4m3fn
ROWS = 32  # per program, for groups in a row. Transposed operands are contiguous along rows: 64 bytes of BF16
WARPS = 8, 16  # per program, for square blocks: with more of them each thread needs fewer registers
COLUMN_STEP = tl.constexpr(formats.COLUMN_STEP)


def quantize_blocks(
    values: torch.Tensor,
    square: bool,
    scale_format: ScaleFormat,
    amax_floor: float,
    *,
    round_to_bf16: bool = False,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    sums: torch.Tensor | None = None,
    first_rows: tuple[int, int] = (0, 0),
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize in blocks of 128x128 (`square`) or 128 of a row, in one launch that does not wait for the device.

    Args:
        values: `[..., N, K]`, any strides. Without `square` `[..., K]`.
        round_to_bf16: Quantize `values.bfloat16()`, which is rounded in registers.
        into: Codes and scales to write to, in the shapes that are returned and any strides. None: new ones.
        sums: With `square`, and K a multiple of 4: the checksums (`digest`) of the codes and of the scales are added
            to this int64 `[2]`.
        first_rows: Rows of codes and of scales, leading dims counted, that come before these in a larger tensor:
            `sums` of all its parts add up to its checksums.
        warps: With `square`. None: the faster of `WARPS`; the first call on a GPU times them, and waits for it.

    Returns:
        Codes in the shape of `values` and fp32 scales `[..., n, k]` (`[..., k]`).

    Raises:
        ValueError: `into` has other shapes or dtypes, or leading dims that no single stride steps through.
    """
    matrices = values.reshape(_matrices(values.shape, square))
    count, rows, columns = matrices.shape
    assert sums is None or (square and columns % 4 == 0)
    height = BLOCK if square else ROWS
    warps = (warps or block_warps(values.device, values.dtype)) if square else 4
    blocks = triton.cdiv(columns, BLOCK)
    scale_shape = (*values.shape[:-2], triton.cdiv(rows, BLOCK), blocks) if square else (*values.shape[:-1], blocks)
    if into is not None:
        codes, scale = into
    else:
        codes = torch.empty(values.shape, dtype=E4M3, device=values.device)
        scale = torch.empty(scale_shape, dtype=torch.float32, device=values.device)
        if not square:  # column by column, as cuBLASLt reads scales of rows
            scale = scale.view(blocks, rows).t().view(scale_shape)
    code_matrices = _destination("codes", codes, values.shape, E4M3, square)
    scale_matrices = _destination("scales", scale, scale_shape, torch.float32, square)
    if values.numel():
        with torch.cuda.device_of(values):
            tensors = matrices, code_matrices, scale_matrices
            strides = [stride for tensor in tensors for stride in tensor.stride()]
            constants = {"SQUARE": square, "POW2": scale_format == "pow2", "HEIGHT": height, "WIDTH": BLOCK}
            constants |= {"LIMIT": E4M3_MAX, "BF16": round_to_bf16 and values.dtype != torch.bfloat16}
            numbers = rows, columns, *strides, *first_rows, amax_floor
            grid = triton.cdiv(rows, height), blocks, count
            _quantize[grid](*tensors, sums, *numbers, **constants, num_warps=warps)
    return codes, scale


@cache
def block_warps(device: torch.device, dtype: torch.dtype) -> int:
    """Return which of `WARPS` quantizes square blocks of `dtype` faster. On a GPU both are timed, once."""
    if device.type == "cpu":
        return WARPS[0]
    values, sums = torch.ones(4096, 4096, dtype=dtype, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    call = partial(quantize_blocks, values, True, "pow2", 1.0, round_to_bf16=True, sums=sums)  # as a sync does
    with torch.cuda.device_of(values):
        times = {warps: do_bench(partial(call, warps=warps), 5, 20, return_mode="median") for warps in WARPS}
    return min(times, key=times.get)


def dequantize_blocks(codes: torch.Tensor, scale: torch.Tensor, square: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of what `quantize_blocks` returned (any strides), in fp32 rounded once to `dtype`."""
    matrices, scales = (each.reshape(_matrices(each.shape, square)) for each in (codes, scale))
    count, rows, columns = matrices.shape
    values = torch.empty(matrices.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        with torch.cuda.device_of(codes):
            grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, BLOCK), count
            strides = *matrices.stride(), *scales.stride()
            _dequantize[grid](matrices, scales, values, rows, columns, *strides, square, ROWS, BLOCK)
    return values.view(codes.shape)


def _matrices(shape: torch.Size | tuple[int, ...], square: bool) -> tuple[int, int, int]:
    """Return (matrices, rows, columns): leading dims are further matrices, or without `square` further rows."""
    return (math.prod(shape[:-2]), *shape[-2:]) if square else (1, math.prod(shape[:-1]), shape[-1])


def _destination(
    name: str, tensor: torch.Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, square: bool
) -> torch.Tensor:
    """Return a view of `tensor` as `_matrices`. A copy would be written to in vain, so it raises instead."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} are to be written into {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {tuple(shape)}."
        )
    try:
        return tensor.view(_matrices(shape, square))
    except RuntimeError as error:
        raise ValueError(
            f"{name} are to be written into shape {tuple(shape)} with strides {tensor.stride()}: "
            "leading dims need to be steps of one stride. Pass parts."
        ) from error


@triton.jit
def tile(rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return int64 row numbers `[HEIGHT]`, column numbers `[WIDTH]`, and which pairs of them are inside the matrix."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _quantize(
    values,
    codes,
    scale,
    sums,
    rows,
    columns,
    matrix_stride,
    row_stride,
    column_stride,
    code_matrix_stride,
    code_row_stride,
    code_column_stride,
    scale_matrix_stride,
    scale_row_stride,
    scale_column_stride,
    first_row,
    first_scale_row,
    amax_floor,
    SQUARE: tl.constexpr,
    POW2: tl.constexpr,
    BF16: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    row, column, inside = tile(rows, columns, HEIGHT, WIDTH)
    place = matrix * matrix_stride + row[:, None] * row_stride + column[None, :] * column_stride
    block = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    if BF16:
        block = block.to(tl.bfloat16).to(tl.float32)

    # 1. amax, of magnitudes as integers: without the sign bit, FP32 numbers are ordered as their bits are, and NaN is
    # above all others, where a maximum of floats would skip it
    magnitude = block.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(magnitude, axis=1), axis=0) if SQUARE else tl.max(magnitude, axis=1)
    floor = tl.full((), amax_floor, tl.float32).to(tl.int32, bitcast=True)

    # 2. The scale. Triton's `/` may be off by two units in the last place; `div_rn` is rounded as torch's is
    inverse = tl.div_rn(tl.maximum(amax, floor).to(tl.float32, bitcast=True), LIMIT)
    if POW2:
        # The next power of two: a mantissa that is not zero carries into the exponent and is cut off, one that is zero
        # stays. Infinity and NaN have no next one
        bits = inverse.to(tl.int32, bitcast=True)
        power = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        inverse = tl.where(bits < 0x7F800000, power, inverse)

    # 3. Codes. The reciprocal of a power of two is exact, so that a product gives what a division would
    if POW2:
        multiplier = tl.div_rn(1.0, inverse)
        scaled = block * (multiplier if SQUARE else multiplier[:, None])
    else:
        scaled = tl.div_rn(block, inverse if SQUARE else inverse[:, None])
    scaled = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    code = scaled.to(codes.dtype.element_ty)
    place = matrix * code_matrix_stride + row[:, None] * code_row_stride + column[None, :] * code_column_stride
    tl.store(codes + place, code, mask=inside)
    place = scale + matrix * scale_matrix_stride + tl.program_id(1) * scale_column_stride
    if SQUARE:
        tl.store(place + tl.program_id(0) * scale_row_stride, inverse)
    else:
        tl.store(place + row * scale_row_stride, inverse, mask=row < rows)

    # 4. Checksums of both while they are in registers: reading them again would cost as much as writing them. Which
    # program adds first does not matter, so that the additions need no order ("relaxed")
    if sums is not None:
        # Sums are linear, so that no word has to be put together: a byte counts as much as the word whose other bytes
        # are zero. A key rises by 2 COLUMN_STEP from word to word: two plain sums of a row, and one 64-bit product for
        # each
        byte = tl.where(inside, code.to(tl.uint8, bitcast=True).to(tl.int32), 0)
        position = tl.arange(0, WIDTH)[None, :]
        word = (byte << (8 * (position % 4))).to(tl.int64)
        by_row, by_column = tl.sum(word, axis=1), tl.sum(word * (position // 4), axis=1)
        block_column = tl.program_id(1).to(tl.int64)
        key = 2 * (first_row + matrix * rows + row + block_column * (WIDTH // 4) * COLUMN_STEP) + 1
        tl.atomic_add(sums, tl.sum(by_row * key + by_column * (2 * COLUMN_STEP), axis=0), sem="relaxed")
        # A scale is a word of its own
        scale_row = first_scale_row + matrix * tl.num_programs(0) + tl.program_id(0)
        scale_word = inverse.to(tl.int32, bitcast=True).to(tl.int64)
        tl.atomic_add(sums + 1, scale_word * (2 * (scale_row + block_column * COLUMN_STEP) + 1), sem="relaxed")


@triton.jit
def _dequantize(
    codes,
    scale,
    values,
    rows,
    columns,
    matrix_stride,
    row_stride,
    column_stride,
    scale_matrix_stride,
    scale_row_stride,
    scale_column_stride,
    SQUARE: tl.constexpr,
    HEIGHT: tl.constexpr,  # divides WIDTH
    WIDTH: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    row, column, inside = tile(rows, columns, HEIGHT, WIDTH)
    place = matrix * matrix_stride + row[:, None] * row_stride + column[None, :] * column_stride
    block = tl.load(codes + place, mask=inside, other=0.0).to(tl.float32)
    scale += matrix * scale_matrix_stride + tl.program_id(1) * scale_column_stride
    if SQUARE:
        block = block * tl.load(scale + tl.program_id(0) * HEIGHT // WIDTH * scale_row_stride)
    else:
        block = block * tl.load(scale + row * scale_row_stride, mask=row < rows, other=0.0)[:, None]
    place = (matrix * rows + row[:, None]) * columns + column[None, :]  # what is written is new, and contiguous
    tl.store(values + place, block.to(values.dtype.element_ty), mask=inside)
