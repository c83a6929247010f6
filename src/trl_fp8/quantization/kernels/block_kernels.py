"""Triton kernels that read a tensor once: quantization in blocks, and dequantization.

torch's operations would read and write an fp32 copy half a dozen times, which takes as long as the GEMM that the codes
are for. Codes, scales and checksums equal, byte for byte, what codec/blockwise.py and codec/digest.py compute on a
CPU. The order of programs does not change a checksum, because it is a sum modulo 2**64.

Shape letters: N rows, K columns, `...` leading dims; n = ceil(N / 128), k = ceil(K / 128).
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
# Rows of a program of `_dequantize`, and of `_quantize` if blocks are not square. In a transposed operand the elements
# of a column are contiguous, and 32 of them in BF16 are 64 bytes in one piece
ROWS = 32
WARPS = 8, 16  # candidates for the warps of a program if blocks are square; more warps need fewer registers per thread
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
    """Quantize in blocks of 128x128 (`square`) or of 128 elements of a row. Does not wait for the device.

    Args:
        values: `[..., N, K]` with `square`; `[..., K]` otherwise. The last two dims may have any strides. If the
            leading dims cannot be merged into one stride, `values` is copied first.
        round_to_bf16: Quantize `values.bfloat16()`, which is rounded in registers.
        into: Codes and scales to write to, in the shapes of the result, with any strides of the last two dims. Their
            leading dims must merge into one stride. None: new tensors.
        sums: int64 `[2]`, to which the checksums (`digest`) of the codes and of the scales are added. Needs `square`
            and a K that is a multiple of 4.
        first_rows: If `values` is part of a larger tensor: how many rows of codes and of scales come before it
            (leading dims count as rows). Then the parts' `sums` add up to the checksums of the whole.
        warps: With `square`, one of `WARPS`. None: the faster one; the first call on a GPU times both, and waits.

    Returns:
        Codes in the shape of `values`, and fp32 scales: `[..., n, k]` with `square`, `[..., k]` otherwise.

    Raises:
        ValueError: A tensor of `into` has another shape or dtype, or leading dims that do not merge into one stride.
    """
    matrices = values.reshape(_matrices(values.shape, square))
    count, rows, columns = matrices.shape
    assert sums is None or (square and columns % 4 == 0)
    block_columns = triton.cdiv(columns, BLOCK)
    if square:
        height = BLOCK
        warps = warps or block_warps(values.device, values.dtype)
        scale_shape = (*values.shape[:-2], triton.cdiv(rows, BLOCK), block_columns)
    else:
        height = ROWS
        warps = 4
        scale_shape = (*values.shape[:-1], block_columns)
    if into is not None:
        codes, scale = into
    else:
        codes = torch.empty(values.shape, dtype=E4M3, device=values.device)
        scale = torch.empty(scale_shape, dtype=torch.float32, device=values.device)
        if not square:  # lay the scales out column-major, as cuBLASLt wants them; the shape stays the same
            scale = scale.view(block_columns, rows).t().view(scale_shape)
    code_matrices = _destination("codes", codes, values.shape, E4M3, square)
    scale_matrices = _destination("scales", scale, scale_shape, torch.float32, square)
    if values.numel():
        with torch.cuda.device_of(values):
            grid = triton.cdiv(rows, height), block_columns, count
            _quantize[grid](
                matrices,
                code_matrices,
                scale_matrices,
                sums,
                rows,
                columns,
                *matrices.stride(),
                *code_matrices.stride(),
                *scale_matrices.stride(),
                *first_rows,
                amax_floor,
                SQUARE=square,
                POW2=scale_format == "pow2",
                BF16=round_to_bf16 and values.dtype != torch.bfloat16,
                HEIGHT=height,
                WIDTH=BLOCK,
                LIMIT=E4M3_MAX,
                num_warps=warps,
            )
    return codes, scale


@cache
def block_warps(device: torch.device, dtype: torch.dtype) -> int:
    """Return which of `WARPS` quantizes square blocks of `dtype` faster. On a GPU the first call times both."""
    if device.type == "cpu":
        return WARPS[0]
    values, sums = torch.ones(4096, 4096, dtype=dtype, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    call = partial(quantize_blocks, values, True, "pow2", 1.0, round_to_bf16=True, sums=sums)  # as a sync does
    with torch.cuda.device_of(values):
        times = {warps: do_bench(partial(call, warps=warps), 5, 20, return_mode="median") for warps in WARPS}
    return min(times, key=times.get)


def dequantize_blocks(codes: torch.Tensor, scale: torch.Tensor, square: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return code * scale in the shape of `codes`, computed in fp32 and rounded once to `dtype`.

    `codes` and `scale` are what `quantize_blocks` returns. Their last two dims may have any strides. A tensor whose
    leading dims cannot be merged into one stride is copied first.
    """
    matrices = codes.reshape(_matrices(codes.shape, square))
    scales = scale.reshape(_matrices(scale.shape, square))
    count, rows, columns = matrices.shape
    values = torch.empty(matrices.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        with torch.cuda.device_of(codes):
            grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, BLOCK), count
            strides = *matrices.stride(), *scales.stride()
            _dequantize[grid](matrices, scales, values, rows, columns, *strides, square, ROWS, BLOCK)
    return values.view(codes.shape)


def _matrices(shape: torch.Size | tuple[int, ...], square: bool) -> tuple[int, int, int]:
    """Return `shape` as (matrices, rows, columns). Leading dims count as matrices with `square`, else as rows."""
    return (math.prod(shape[:-2]), *shape[-2:]) if square else (1, math.prod(shape[:-1]), shape[-1])


def _destination(
    name: str, tensor: torch.Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, square: bool
) -> torch.Tensor:
    """Return a view of `tensor` in the shape of `_matrices`. Raise `ValueError` if its shape or dtype is wrong, or if
    only a copy can have that shape, because writing to a copy would not reach `tensor`.
    """
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} are to be written into {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {tuple(shape)}."
        )
    try:
        return tensor.view(_matrices(shape, square))
    except RuntimeError as error:
        raise ValueError(
            f"{name} are to be written into shape {tuple(shape)} with strides {tensor.stride()}: "
            "its leading dims cannot be merged into one. Pass each matrix by itself."
        ) from error


@triton.jit
def tile(rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return a program's row numbers `[HEIGHT]` and column numbers `[WIDTH]`, int64, and which elements are inside the
    matrix, bool `[HEIGHT, WIDTH]`.
    """
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _quantize(
    values,
    codes,
    scales,
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

    # 1. amax, the largest magnitude, found as the largest integer. Without the sign bit, the bits of FP32 numbers have
    # the order of their magnitudes, and NaN is above all others; a maximum of floats would skip NaN
    magnitude = block.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(magnitude, axis=1), axis=0) if SQUARE else tl.max(magnitude, axis=1)
    floor = tl.full((), amax_floor, tl.float32).to(tl.int32, bitcast=True)

    # 2. The scale. Triton's `/` may be off by two units in the last place; `div_rn` rounds as torch's division does
    scale = tl.div_rn(tl.maximum(amax, floor).to(tl.float32, bitcast=True), LIMIT)
    if POW2:
        # Round up to a power of two: adding 0x7FFFFF carries a nonzero mantissa into the exponent, and the mask clears
        # the mantissa. Infinity and NaN stay as they are
        bits = scale.to(tl.int32, bitcast=True)
        power = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(bits < 0x7F800000, power, scale)

    # 3. Codes. The reciprocal of a power of two is exact, so the product equals the quotient
    if POW2:
        multiplier = tl.div_rn(1.0, scale)
        scaled = block * (multiplier if SQUARE else multiplier[:, None])
    else:
        scaled = tl.div_rn(block, scale if SQUARE else scale[:, None])
    scaled = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    code = scaled.to(codes.dtype.element_ty)
    place = matrix * code_matrix_stride + row[:, None] * code_row_stride + column[None, :] * code_column_stride
    tl.store(codes + place, code, mask=inside)
    # Pointer to the scales of this column of blocks
    column_scales = scales + matrix * scale_matrix_stride + tl.program_id(1) * scale_column_stride
    if SQUARE:
        tl.store(column_scales + tl.program_id(0) * scale_row_stride, scale)
    else:
        tl.store(column_scales + row * scale_row_stride, scale, mask=row < rows)

    # 4. Checksums of codes and scales while they are in registers, because reading them again would cost as much as
    # writing them. Programs may add in any order ("relaxed")
    if sums is not None:
        # A row adds the sum over j of word_j * key_j, where word_j is its j-th word in this block, and
        # key_j = first_key + 2 j COLUMN_STEP (codec/digest.py). This is equal to
        #     first_key * (sum of word_j) + 2 COLUMN_STEP * (sum of j * word_j)
        # so only two products per row are of 64 bits. A word is the sum of its 4 bytes, each shifted to its place in
        # the word, so both sums run over shifted bytes, and no word is built
        byte = tl.where(inside, code.to(tl.uint8, bitcast=True).to(tl.int32), 0)
        position = tl.arange(0, WIDTH)[None, :]
        shifted_byte = (byte << (8 * (position % 4))).to(tl.int64)
        sum_of_words = tl.sum(shifted_byte, axis=1)
        sum_of_j_words = tl.sum(shifted_byte * (position // 4), axis=1)
        block_column = tl.program_id(1).to(tl.int64)
        first_key = 2 * (first_row + matrix * rows + row + block_column * (WIDTH // 4) * COLUMN_STEP) + 1
        products = sum_of_words * first_key + sum_of_j_words * (2 * COLUMN_STEP)
        tl.atomic_add(sums, tl.sum(products, axis=0), sem="relaxed")
        # A scale is one whole word
        scale_row = first_scale_row + matrix * tl.num_programs(0) + tl.program_id(0)
        scale_word = scale.to(tl.int32, bitcast=True).to(tl.int64)
        tl.atomic_add(sums + 1, scale_word * (2 * (scale_row + block_column * COLUMN_STEP) + 1), sem="relaxed")


@triton.jit
def _dequantize(
    codes,
    scales,
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
    HEIGHT: tl.constexpr,  # divides WIDTH, so a program's rows lie in one square block
    WIDTH: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    row, column, inside = tile(rows, columns, HEIGHT, WIDTH)
    place = matrix * matrix_stride + row[:, None] * row_stride + column[None, :] * column_stride
    block = tl.load(codes + place, mask=inside, other=0.0).to(tl.float32)
    # Pointer to the scales of this column of blocks
    column_scales = scales + matrix * scale_matrix_stride + tl.program_id(1) * scale_column_stride
    if SQUARE:
        block_row = tl.program_id(0) * HEIGHT // WIDTH
        block = block * tl.load(column_scales + block_row * scale_row_stride)
    else:
        block = block * tl.load(column_scales + row * scale_row_stride, mask=row < rows, other=0.0)[:, None]
    place = (matrix * rows + row[:, None]) * columns + column[None, :]  # `values` is new and contiguous
    tl.store(values + place, block.to(values.dtype.element_ty), mask=inside)
