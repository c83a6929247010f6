"""Blockwise quantization on a GPU, there and back: Triton kernels that read a tensor once and write the result.

torch's operations would read and write an fp32 copy of the tensor half a dozen times, which takes as long as the GEMM
that the codes are for. The results are the same, byte for byte, as those of blockwise.py on CPU; for that the first
kernel divides with `div_rn` (Triton's `/` may be off by two units in the last place; torch's CUDA division by a
Python number multiplies by the reciprocal), and compares magnitudes as integers, so that NaN, the largest of them, is
not skipped.
"""

import torch
import triton
import triton.language as tl

from .digest_kernel import tile
from .e4m3 import E4M3, E4M3_MAX
from .formats.blocks import BLOCK
from .formats.spec import ScaleFormat


ROWS = 32  # per program, for groups in a row. Transposed operands are contiguous along rows: 64 bytes of BF16


def quantize_blocks(
    values: torch.Tensor, square: bool, scale_format: ScaleFormat, amax_floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `values` `[..., N, K]`, any strides, in blocks of 128x128 (`square`) or groups of 128 in a
    row. A last block that is not filled is quantized as if padded with zeros.

    Returns:
        e4m3 codes of `values`' shape, contiguous, and fp32 scales `[..., ceil(N/128), ceil(K/128)]`, or
        `[..., ceil(K/128)]` without `square`. The scales of rows are stored column by column, as cuBLASLt reads them.
    """
    matrices = _matrices(values, square)
    count, rows, columns = matrices.shape
    codes = torch.empty(matrices.shape, dtype=E4M3, device=values.device)
    blocks = triton.cdiv(columns, BLOCK)
    if square:
        scale = torch.empty((count, triton.cdiv(rows, BLOCK), blocks), dtype=torch.float32, device=values.device)
    else:
        scale = torch.empty((count, blocks, rows), dtype=torch.float32, device=values.device).transpose(1, 2)
    height = BLOCK if square else ROWS
    constants = {"SQUARE": square, "POW2": scale_format == "pow2", "HEIGHT": height, "WIDTH": BLOCK, "LIMIT": E4M3_MAX}
    if values.numel():
        with torch.cuda.device_of(values):
            grid, strides = (triton.cdiv(rows, height), blocks, count), (*matrices.stride(), *scale.stride())
            warps = 8 if square else 4
            _quantize[grid](matrices, codes, scale, rows, columns, *strides, amax_floor, **constants, num_warps=warps)
    lead = values.shape[:-2] if square else values.shape[:-1]
    return codes.view(values.shape), scale.view(*lead, *scale.shape[1 if square else 2 :])


def dequantize_blocks(codes: torch.Tensor, scale: torch.Tensor, square: bool, dtype: torch.dtype) -> torch.Tensor:
    """`codes` times the scales of their blocks, in fp32, rounded once to `dtype`; shapes as `quantize_blocks` returns
    them, any strides. The result is contiguous.
    """
    matrices, scales = _matrices(codes, square), _matrices(scale, square)
    count, rows, columns = matrices.shape
    values = torch.empty(matrices.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        with torch.cuda.device_of(codes):
            grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, BLOCK), count
            strides = *matrices.stride(), *scales.stride()
            constants = {"SQUARE": square, "HEIGHT": ROWS, "WIDTH": BLOCK}
            _dequantize[grid](matrices, scales, values, rows, columns, *strides, **constants)
    return values.view(codes.shape)


def _matrices(tensor: torch.Tensor, square: bool) -> torch.Tensor:
    """`[matrices, rows, columns]`: leading dims are further matrices, or without `square` further rows."""
    return tensor.reshape(-1, *tensor.shape[-2:]) if square else tensor.reshape(1, -1, tensor.shape[-1])


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

    magnitude = block.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(magnitude, axis=1), axis=0) if SQUARE else tl.max(magnitude, axis=1)
    floor = tl.full((), amax_floor, tl.float32).to(tl.int32, bitcast=True)
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
