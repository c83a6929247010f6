"""Blockwise e4m3 quantization: each block of a tensor (128x128 of a weight, 128 elements of a token) has a scale.

One scale per block keeps an outlier's damage inside its block, and 128x128 blocks are the layout that vLLM's FP8
linears, DeepGEMM and the DeepSeek-V3 checkpoints share (arXiv 2412.19437, section 3.3). The result is torchao's
`Float8Tensor`: `qdata` holds the codes and `scale` is what checkpoints call `weight_scale_inv`.

torchao's own `Float8Tensor.from_hp` takes the scale in the input's dtype, turns an all-zero block into NaN, refuses
ragged shapes, has no power-of-two scales, and needs 8.5 times the weight in temporary memory. On aligned weights with
fp32 scales it gives the same bytes for `w.float()` and `hp_value_lb=1e-12`: tests/quantization/test_blockwise.py.

Shape letters: N out-features, K in-features, `...` any leading dims (experts), n x k blocks.
"""

import torch
from torchao.quantization import Float8Tensor

from .e4m3 import E4M3, casts_in_hardware, check_scale_format, saturating_cast_, scale_from_amax
from .formats.blocks import BLOCK, WEIGHT_AMAX_FLOOR
from .formats.spec import ACTIVATION_AMAX_FLOOR, ScaleFormat


def quantize_weight(
    weight: torch.Tensor,
    scale_format: ScaleFormat = "pow2",
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    amax_floor: float = WEIGHT_AMAX_FLOOR,
    amax: torch.Tensor | None = None,
    name: str = "weight",
    check_finite: bool = True,
) -> Float8Tensor:
    """Quantize a weight in blocks.

    Args:
        weight: `[..., N, K]` in BF16, FP16 or FP32; blocks that N or K do not fill count as padded with zeros.
        scale_format: `"pow2"` or `"fp32"`; see `trl_fp8.quantization.e4m3`.
        block: Rows and columns that share a scale.
        amax_floor: Smallest amax that a block is given.
        amax: Largest magnitude of every block, 0-d. None: of each block, what it holds.
        name: What to call the weight in an error.
        check_finite: Raise if the weight holds NaN or infinities. On CUDA this waits for the device.

    Returns:
        A `Float8Tensor` with `qdata` `[..., N, K]` and fp32 `scale` `[..., n, k]`, both new storage. On CPU one fp32
        copy of the (padded) weight is alive besides, on a GPU with 128x128 blocks nothing.

    Raises:
        ValueError: `weight` has fewer than two dims or is not floating point, `scale_format` is unknown, or the
            weight is not finite; the message names the weight and its first bad block.
    """
    if weight.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}: block quantization needs at least two dims [N, K].")
    tensor = _quantize(weight, block, name, scale_format, amax_floor, amax)
    if check_finite and (bad := ~torch.isfinite(tensor.scale)).any():
        first = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} holds NaN or infinite values ({int(bad.sum())} of {bad.numel()} blocks, the first at block "
            f"index {first} of {block[0]}x{block[1]} blocks): it cannot be quantized. Look at the last optimizer "
            "step: a lower learning rate, gradient clipping (max_grad_norm) or another dtype are the usual remedies."
        )
    return tensor


def quantize_activation(
    activation: torch.Tensor,
    scale_format: ScaleFormat = "pow2",
    *,
    group: int = BLOCK,
    amax_floor: float = ACTIVATION_AMAX_FLOOR,
    reciprocal: bool = False,
) -> Float8Tensor:
    """Quantize activations in groups along the last dim, as vLLM does before an FP8 linear.

    Args:
        activation: `[..., K]`, floating point; a group that K does not fill counts as padded with zeros.
        scale_format, amax_floor, reciprocal: What the engine's kernel uses, see `formats.spec.ActivationScaling`.
        group: Elements that share a scale.

    Returns:
        A `Float8Tensor` with `qdata` `[..., K]` and fp32 `scale` `[..., k]`. NaN stays NaN in its group.
    """
    return _quantize(activation, (group,), "activation", scale_format, amax_floor, reciprocal=reciprocal)


def dequantize_weight(tensor: Float8Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`qdata * scale` per block, in fp32, rounded once to `dtype` (by default the dtype that was quantized).

    Exact in BF16 for power-of-two scales. Takes what `quantize_weight` or `quantize_activation` returned.
    """
    blocks = tuple(size for size in tensor.block_size if size > 1)
    if casts_in_hardware(tensor.qdata.device) and set(blocks) == {BLOCK}:
        from .kernels import dequantize_blocks  # Triton compiles for GPUs only

        return dequantize_blocks(tensor.qdata, tensor.scale, len(blocks) == 2, dtype or tensor.dtype)
    values, view, _ = _padded_blocks(tensor.qdata, blocks)
    view.mul_(_expandable(tensor.scale, len(blocks)))
    return _crop(values, tensor.qdata.shape).to(dtype or tensor.dtype)


def first_rows(codes: Float8Tensor, count: int) -> Float8Tensor:
    """The first `count` of the N rows of a quantized weight, or all; a view."""
    *lead, rows, columns = codes.block_size
    parts = codes.qdata[..., :count, :], codes.scale[..., : -(-count // rows), :]
    return Float8Tensor(*parts, block_size=[*lead, min(rows, count), columns], dtype=codes.dtype)


def _quantize(
    values: torch.Tensor,
    blocks: tuple[int, ...],
    name: str,
    scale_format: ScaleFormat,
    amax_floor: float,
    amax: torch.Tensor | None = None,
    reciprocal: bool = False,
) -> Float8Tensor:
    check_scale_format(scale_format)
    if not values.is_floating_point() or values.dtype == E4M3:
        raise ValueError(f"{name} has dtype {values.dtype}: expected an unquantized floating point tensor.")
    if casts_in_hardware(values.device) and set(blocks) == {BLOCK} and amax is None and not reciprocal:
        from .kernels import quantize_blocks  # Triton compiles for GPUs only

        qdata, scale = quantize_blocks(values.detach(), len(blocks) == 2, scale_format, amax_floor)
    else:
        qdata, scale = _quantize_by_torch(values.detach(), blocks, scale_format, amax_floor, amax, reciprocal)
    block_size = [1] * (values.dim() - len(blocks)) + list(blocks)
    return Float8Tensor(qdata, scale, block_size=block_size, dtype=values.dtype)


def _quantize_by_torch(
    values: torch.Tensor,
    blocks: tuple[int, ...],
    scale_format: ScaleFormat,
    amax_floor: float,
    amax: torch.Tensor | None = None,
    reciprocal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; what kernels.py computes on a GPU."""
    scaled, view, reduced = _padded_blocks(values, blocks)
    if amax is None:
        amax = torch.maximum(view.amax(reduced), -view.amin(reduced))  # no |values| temporary; NaN passes through
    else:
        amax = amax.expand([size for dim, size in enumerate(view.shape) if dim - view.dim() not in reduced])
    scale = scale_from_amax(amax, scale_format, amax_floor)
    divisor = _expandable(scale, len(blocks))
    view.mul_(divisor.reciprocal()) if reciprocal else view.div_(divisor)
    return saturating_cast_(_crop(scaled, values.shape)).contiguous(), scale


def _padded_blocks(
    values: torch.Tensor, blocks: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """An fp32 copy of `values`, zero-padded to whole blocks; its view by blocks; the dims inside a block."""
    lead, tail = values.shape[: -len(blocks)], values.shape[-len(blocks) :]
    padded = [-(-size // block) * block for size, block in zip(tail, blocks, strict=True)]
    allocate = torch.empty if padded == list(tail) else torch.zeros
    copy = allocate((*lead, *padded), dtype=torch.float32, device=values.device)
    _crop(copy, values.shape).copy_(values)
    interleaved = [part for size, block in zip(padded, blocks, strict=True) for part in (size // block, block)]
    return copy, copy.view(*lead, *interleaved), tuple(range(-2 * len(blocks) + 1, 0, 2))


def _expandable(scale: torch.Tensor, block_dims: int) -> torch.Tensor:
    """`[..., n, k]` -> `[..., n, 1, k, 1]` (or `[..., k, 1]`), to broadcast against a view by blocks."""
    return scale[(..., *[slice(None), None] * block_dims)]


def _crop(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return values[tuple(slice(size) for size in shape)] if values.shape != shape else values
