"""Triton kernels that read a tensor once: blockwise quantization, there and back, and the checksum.

torch's operations would read and write an fp32 copy half a dozen times, which takes as long as the GEMM that the codes
are for, and launch a dozen kernels per checksum, of which a sync takes hundreds. The results equal those of
blockwise.py and digest.py on CPU, byte for byte: sums modulo 2**64 do not depend on the order of programs.
"""

import torch
import triton
import triton.language as tl

from .e4m3 import E4M3, E4M3_MAX
from .formats.blocks import BLOCK
from .formats.spec import ScaleFormat


HEIGHT, WIDTH = 32, 256  # words of a checksum per program
ROWS = 32  # per program, for groups in a row. Transposed operands are contiguous along rows: 64 bytes of BF16


def quantize_blocks(
    values: torch.Tensor, square: bool, scale_format: ScaleFormat, amax_floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (contiguous) and scales of `values`, any strides, in blocks of 128x128 (`square`) or 128 of a row."""
    matrices = _matrices(values, square)
    count, rows, columns = matrices.shape
    codes = torch.empty(matrices.shape, dtype=E4M3, device=values.device)
    blocks = triton.cdiv(columns, BLOCK)
    if square:
        scale = torch.empty((count, triton.cdiv(rows, BLOCK), blocks), dtype=torch.float32, device=values.device)
    else:  # column by column, as cuBLASLt reads scales of rows
        scale = torch.empty((count, blocks, rows), dtype=torch.float32, device=values.device).transpose(1, 2)
    height, warps = (BLOCK, 8) if square else (ROWS, 4)
    constants = {"SQUARE": square, "POW2": scale_format == "pow2", "HEIGHT": height, "WIDTH": BLOCK, "LIMIT": E4M3_MAX}
    if values.numel():
        with torch.cuda.device_of(values):
            grid, strides = (triton.cdiv(rows, height), blocks, count), (*matrices.stride(), *scale.stride())
            _quantize[grid](matrices, codes, scale, rows, columns, *strides, amax_floor, **constants, num_warps=warps)
    lead = values.shape[:-2] if square else values.shape[:-1]
    return codes.view(values.shape), scale.view(*lead, *scale.shape[1 if square else 2 :])


def dequantize_blocks(codes: torch.Tensor, scale: torch.Tensor, square: bool, dtype: torch.dtype) -> torch.Tensor:
    """What `quantize_blocks` returned (any strides) as values, contiguous: in fp32, rounded once to `dtype`."""
    matrices, scales = _matrices(codes, square), _matrices(scale, square)
    count, rows, columns = matrices.shape
    values = torch.empty(matrices.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        with torch.cuda.device_of(codes):
            grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, BLOCK), count
            strides = *matrices.stride(), *scales.stride()
            _dequantize[grid](matrices, scales, values, rows, columns, *strides, square, ROWS, BLOCK)
    return values.view(codes.shape)


def add_words(total: torch.Tensor, words: torch.Tensor, first_row: int, column_step: int) -> None:
    """Add int32 `words` `[R, C]`, contiguous, times `2 (first_row + r + c column_step) + 1` to `total`, mod 2**64."""
    rows, columns = words.shape
    if words.numel():
        # Short rows, or few of them, are given tiles of their shape
        width = min(triton.next_power_of_2(columns), HEIGHT * WIDTH if rows < HEIGHT else WIDTH)
        height = HEIGHT * WIDTH // width
        with torch.cuda.device_of(words):
            grid = triton.cdiv(rows, height), triton.cdiv(columns, width)
            _add_words[grid](total, words, rows, columns, first_row, column_step, HEIGHT=height, WIDTH=width)


def _matrices(tensor: torch.Tensor, square: bool) -> torch.Tensor:
    """`[matrices, rows, columns]`: leading dims are further matrices, or without `square` further rows."""
    return tensor.reshape(-1, *tensor.shape[-2:]) if square else tensor.reshape(1, -1, tensor.shape[-1])


@triton.jit
def tile(rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Row numbers `[HEIGHT]` and column numbers `[WIDTH]` in int64, and which pairs of them are inside the matrix."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _quantize(
    values,
    codes,
    scale,
    rows,
    columns,
    matrix_stride,
    row_stride,
    column_stride,
    scale_matrix_stride,
    scale_row_stride,
    scale_column_stride,
    amax_floor,
    SQUARE: tl.constexpr,
    POW2: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    row, column, inside = tile(rows, columns, HEIGHT, WIDTH)
    place = matrix * matrix_stride + row[:, None] * row_stride + column[None, :] * column_stride
    block = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)

    # As integers, so that NaN, the largest of them, is not skipped
    magnitude = block.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(magnitude, axis=1), axis=0) if SQUARE else tl.max(magnitude, axis=1)
    floor = tl.full((), amax_floor, tl.float32).to(tl.int32, bitcast=True)
    # Triton's `/` may be off by two units in the last place
    inverse = tl.div_rn(tl.maximum(amax, floor).to(tl.float32, bitcast=True), LIMIT)
    if POW2:  # a mantissa that is not zero carries into the exponent
        bits = inverse.to(tl.int32, bitcast=True)
        power = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        inverse = tl.where(bits < 0x7F800000, power, inverse)
        multiplier = tl.div_rn(1.0, inverse)  # exact
        scaled = block * (multiplier if SQUARE else multiplier[:, None])
    else:
        scaled = tl.div_rn(block, inverse if SQUARE else inverse[:, None])
    scaled = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    place = (matrix * rows + row[:, None]) * columns + column[None, :]
    tl.store(codes + place, scaled.to(codes.dtype.element_ty), mask=inside)
    place = scale + matrix * scale_matrix_stride + tl.program_id(1) * scale_column_stride
    if SQUARE:
        tl.store(place + tl.program_id(0) * scale_row_stride, inverse)
    else:
        tl.store(place + row * scale_row_stride, inverse, mask=row < rows)


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
    place = (matrix * rows + row[:, None]) * columns + column[None, :]
    tl.store(values + place, block.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _add_words(total, words, rows, columns, first_row, column_step, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    row, column, inside = tile(rows, columns, HEIGHT, WIDTH)
    word = tl.load(words + row[:, None] * columns + column[None, :], mask=inside, other=0).to(tl.int64)
    key = 2 * ((first_row + row)[:, None] + (column * column_step)[None, :]) + 1
    tl.atomic_add(total, tl.sum(tl.sum(word * key, axis=1), axis=0))
