"""Blockwise e4m3 quantization: 128x128 blocks for weights, 1x128 groups for activations.

One scale per block keeps an outlier's damage inside its block, and 128x128 blocks are the layout that vLLM's FP8
linears, DeepGEMM and the DeepSeek-V3 checkpoints share (arXiv 2412.19437, section 3.3). The result is torchao's
`Float8Tensor`: `qdata` holds the codes and `scale` is what checkpoints call `weight_scale_inv`.

Why torchao's own `Float8Tensor.from_hp` is not called: it takes the scale in the input's dtype (a BF16 weight gets
BF16-rounded scales), turns an all-zero block into NaN, refuses ragged shapes, has no power-of-two scales, and needs
8.5 times the weight in temporary memory. On aligned weights with fp32 scales the bytes here equal
`Float8Tensor.from_hp(w.float(), granularity=PerBlock([128, 128]), hp_value_lb=1e-12)`:
tests/quantization/test_blockwise.py.

Shape letters: N out-features, K in-features, `...` any leading dims (experts).
"""

import torch
from torchao.quantization import Float8Tensor

from .e4m3 import E4M3, casts_in_hardware, check_scale_format, saturating_cast_, scale_from_amax
from .formats import BLOCK, ScaleFormat


# vLLM's activation kernels floor amax here (csrc/quantization/w8a8/fp8/per_token_group_quant.cu); it is far below any
# activation that matters and only keeps an all-zero group from dividing by zero.
ACTIVATION_AMAX_FLOOR = 1e-10
# Where the scale, and not amax, is floored, at 1 / (448 * 512): by vLLM's torch path (input_quant_fp8.py,
# QuantFP8.forward_native) and by its kernel that fuses an activation function with the quantization
# (silu_and_mul_per_block_quant)
FLOORED_SCALE_AMAX = 1 / 512
# Smallest amax of a weight's block. Kernels multiply the scales of weight and activation, and some make NaN of very
# small ones (flashinfer#2595: blocks of dead experts). A block that is below it is lost in any sum with another.
WEIGHT_AMAX_FLOOR = 1e-12


def quantize_weight(
    weight: torch.Tensor,
    scale_format: ScaleFormat = "pow2",
    *,
    name: str = "weight",
    check_finite: bool = True,
) -> Float8Tensor:
    """Quantize a weight in 128x128 blocks.

    Args:
        weight: `[..., N, K]` in BF16, FP16 or FP32. A last block that N or K does not fill is quantized as if padded
            with zeros.
        scale_format: `"pow2"` or `"fp32"`; see `trl_fp8.numerics.e4m3`.
        name: What to call the weight in an error.
        check_finite: Raise if the weight holds NaN or infinities. On CUDA this waits for the device; callers that
            quantize many weights check them together first.

    Returns:
        A `Float8Tensor` with `qdata` `[..., N, K]` and fp32 `scale` `[..., ceil(N/128), ceil(K/128)]`. Both are new
        storage. On CPU at most one fp32 copy of the (padded) weight is alive besides, on a GPU nothing.

    Raises:
        ValueError: `weight` has fewer than two dims or is not floating point, `scale_format` is unknown, or the
            weight is not finite; the message names the weight and its first bad block.
    """
    if weight.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}: block quantization needs at least two dims [N, K].")
    tensor = _quantize(weight, (BLOCK, BLOCK), scale_format, amax_floor=WEIGHT_AMAX_FLOOR, name=name)
    if check_finite:
        require_finite_scales(tensor.scale, name)
    return tensor


def quantize_activation(
    activation: torch.Tensor, scale_format: ScaleFormat = "pow2", *, amax_floor: float = ACTIVATION_AMAX_FLOOR
) -> Float8Tensor:
    """Quantize activations in groups of 128 along the last dim, as vLLM does before an FP8 linear.

    Args:
        activation: `[..., K]`, floating point; a last group that K does not fill is quantized as if padded with zeros.
        scale_format: `"pow2"` (DeepGEMM) or `"fp32"` (CUTLASS, Triton): what the engine's kernel uses.
        amax_floor: Smallest amax a group is given: `ACTIVATION_AMAX_FLOOR` of vLLM's CUDA kernels,
            `FLOORED_SCALE_AMAX` of those that floor the scale.

    Returns:
        A `Float8Tensor` with `qdata` `[..., K]` and fp32 `scale` `[..., ceil(K/128)]`. NaN stays NaN in its group.
    """
    return _quantize(activation, (BLOCK,), scale_format, amax_floor=amax_floor, name="activation")


def dequantize_weight(tensor: Float8Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`qdata * scale` per block, in fp32, rounded once to `dtype` (by default the dtype that was quantized).

    Exact in BF16 for power-of-two scales. Takes what `quantize_weight` or `quantize_activation` returned.
    """
    blocks = tuple(size for size in tensor.block_size if size > 1)
    if casts_in_hardware(tensor.qdata.device):
        from .blockwise_kernel import dequantize_blocks  # Triton compiles for GPUs only

        return dequantize_blocks(tensor.qdata, tensor.scale, len(blocks) == 2, dtype or tensor.dtype)
    values, view, _ = _padded_blocks(tensor.qdata, blocks)
    view.mul_(_expandable(tensor.scale, len(blocks)))
    return _crop(values, tensor.qdata.shape).to(dtype or tensor.dtype)


def dead_blocks(scale: torch.Tensor, scale_format: ScaleFormat) -> torch.Tensor:
    """Which blocks of `quantize_weight`'s result are as good as zero: no element is above 1e-12 (pow2: 1.6e-12).

    Their scale is held at the floor, so elements below about 1e-15 become zero: such a block computes no NaN, but it
    does not come back to life in the engine either before its weights have grown.

    Args:
        scale: fp32 `[..., ceil(N/128), ceil(K/128)]`.
        scale_format: That of the scales.

    Returns:
        bool of `scale`'s shape.
    """
    floor = torch.tensor(WEIGHT_AMAX_FLOOR, device="cpu")  # so that nothing is waited for
    return scale <= scale_from_amax(floor, scale_format).item()


def require_finite_scales(scale: torch.Tensor, name: str) -> None:
    """Raise `ValueError` naming the first block whose scale is NaN or infinite, which is where the weight is."""
    bad = ~torch.isfinite(scale)
    if bad.any():
        block = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} holds NaN or infinite values ({int(bad.sum())} of {scale.numel()} blocks, the first at block "
            f"index {block} of 128x128 blocks): it cannot be quantized. Look at the last optimizer step: a lower "
            "learning rate, gradient clipping (max_grad_norm) or another dtype are the usual remedies."
        )


def _quantize(
    values: torch.Tensor, blocks: tuple[int, ...], scale_format: ScaleFormat, amax_floor: float, name: str
) -> Float8Tensor:
    check_scale_format(scale_format)
    if not values.is_floating_point() or values.dtype == E4M3:
        raise ValueError(f"{name} has dtype {values.dtype}: expected an unquantized floating point tensor.")
    if casts_in_hardware(values.device):
        from .blockwise_kernel import quantize_blocks  # Triton compiles for GPUs only

        qdata, scale = quantize_blocks(values.detach(), len(blocks) == 2, scale_format, amax_floor)
    else:
        qdata, scale = _quantize_by_torch(values.detach(), blocks, scale_format, amax_floor)
    block_size = [1] * (values.dim() - len(blocks)) + list(blocks)
    return Float8Tensor(qdata, scale, block_size=block_size, dtype=values.dtype)


def _quantize_by_torch(
    values: torch.Tensor, blocks: tuple[int, ...], scale_format: ScaleFormat, amax_floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; what blockwise_kernel.py computes on a GPU."""
    scaled, view, reduced = _padded_blocks(values, blocks)
    amax = torch.maximum(view.amax(reduced), -view.amin(reduced))  # no |values| temporary; NaN passes through
    scale = scale_from_amax(amax, scale_format, amax_floor)
    view.div_(_expandable(scale, len(blocks)))
    return saturating_cast_(_crop(scaled, values.shape)).contiguous(), scale


def _padded_blocks(
    values: torch.Tensor, blocks: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """An fp32 copy of `values`, zero-padded to whole blocks; its view by blocks; the dims inside a block."""
    lead, tail = values.shape[: -len(blocks)], values.shape[-len(blocks) :]
    counts = [-(-size // block) for size, block in zip(tail, blocks, strict=True)]
    padded = [count * block for count, block in zip(counts, blocks, strict=True)]
    allocate = torch.empty if padded == list(tail) else torch.zeros
    copy = allocate((*lead, *padded), dtype=torch.float32, device=values.device)
    _crop(copy, values.shape).copy_(values)
    interleaved = [size for pair in zip(counts, blocks, strict=True) for size in pair]
    return copy, copy.view(*lead, *interleaved), tuple(range(-2 * len(blocks) + 1, 0, 2))


def _expandable(scale: torch.Tensor, block_dims: int) -> torch.Tensor:
    """`[..., n, k]` -> `[..., n, 1, k, 1]` (or `[..., k, 1]`), to broadcast against a view by blocks."""
    for dim in range(block_dims):
        scale = scale.unsqueeze(-1 - 2 * dim)
    return scale


def _crop(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return values[tuple(slice(size) for size in shape)] if values.shape != shape else values
