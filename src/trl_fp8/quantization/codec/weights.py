"""FP8 weights of a format: how they are quantized, viewed in an engine's tensors, and stored in a checkpoint.

Shapes: a weight `[N, K]` has scales `[n, k]`, one for each block; experts `[E, N, K]` have scales `[E, n, k]`. If a
whole weight has one scale, the scale is `[]` in an engine, `[1]` in a checkpoint, and `[1, 1]`, one block, here.
"""

from collections.abc import Sequence

import torch
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.formats import ActivationScaling, FormatSpec, ScaleFormat

from .blockwise import quantize_activation, quantize_weight
from .e4m3 import E8M0, scale_from_amax


def quantize_fused(weights: Sequence[torch.Tensor], spec: FormatSpec, scale_format: ScaleFormat) -> list[Float8Tensor]:
    """Quantize one weight `[..., N, K]`, or the weights that vLLM fuses. Does not synchronize with the device.

    A weight with NaN or infinity gets scales that are not finite either. The caller has to check the scales.
    """
    amax = common_amax(weights, spec)
    options = {"amax": amax, "amax_floor": spec.weight_amax_floor, "check_finite": False}
    quantized = []
    for weight in weights:
        block = spec.weight_block or tuple(weight.shape)
        quantized.append(quantize_weight(weight, scale_format, block=block, **options))
    return quantized


def common_amax(weights: Sequence[torch.Tensor], spec: FormatSpec) -> torch.Tensor | None:
    """Return the largest magnitude in `weights`, 0-d, if the weights share one scale; None if each block has its own
    scale.
    """
    if not spec.fused_share_scale:
        return None
    # Weights are rounded to BF16 before they are quantized. Rounding keeps the order of numbers, so the largest
    # rounded magnitude is the rounded largest magnitude, and no rounded copy of the weights is needed
    amaxes = [torch.stack(torch.aminmax(weight.detach())).abs().amax() for weight in weights]
    return torch.stack(amaxes).amax().to(torch.bfloat16)


def quantize_as_engine(x: torch.Tensor, spec: FormatSpec, scaling: ActivationScaling) -> Float8Tensor:
    """Quantize activations `[..., K]` as an engine of this format and scaling does."""
    group = spec.activation_group or x.shape[-1]
    options = {"amax_floor": scaling.amax_floor, "reciprocal": scaling.reciprocal}
    return quantize_activation(x, scaling.scale_format, group=group, **options)


def as_blocks(scale: torch.Tensor) -> torch.Tensor:
    """Return a view `[..., n, k]` of an engine's scales: bytes as e8m0 numbers, the scale of a whole weight as
    `[1, 1]`.
    """
    if scale.dtype == torch.uint8:
        scale = scale.view(E8M0)
    return scale if scale.dim() > 1 else scale.view(1, 1)


def joined_halves(tensor: torch.Tensor) -> torch.Tensor:
    """Return gate and up of experts as `[E, N, K]`. Layouts address them as halves, `[E, 2, N / 2, K]`. Other tensors
    are returned unchanged.

    The result is a view, unless a tensor parallel rank holds a part of each half.
    """
    return tensor.flatten(1, 2) if tensor.dim() == 4 else tensor


def held_weight(codes: torch.Tensor, scale: torch.Tensor, spec: FormatSpec) -> Float8Tensor:
    """Return an engine's `codes` and `scale` as one FP8 weight; both may be in halves (see `joined_halves`)."""
    codes = joined_halves(codes)
    scale = as_blocks(joined_halves(scale))
    block = [1] * (codes.dim() - 2) + list(spec.weight_block or codes.shape[-2:])
    return Float8Tensor(codes, scale, block_size=block, dtype=torch.bfloat16)


def stored_scale(codes: Float8Tensor, spec: FormatSpec) -> torch.Tensor:
    """Return the scales of a quantized weight in the shape and dtype in which checkpoints have them."""
    scale = codes.scale if spec.weight_block else codes.scale.view(1)
    if spec.scale_dtype == "uint8":
        return scale.to(E8M0).view(torch.uint8)
    return scale


def extremes(scales: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest scale in each of n tensors of scales, both fp32 `[n]`, on the device.

    NaN counts as the largest. Does not synchronize with the device.
    """
    if scales[0].dtype == torch.uint8:  # the bytes (exponents) have the order of the numbers, and NaN is the largest
        bytes_n2 = torch.stack([torch.stack(torch.aminmax(scale)) for scale in scales])
        extremes_n2 = bytes_n2.view(E8M0).float()
        return extremes_n2[:, 0], extremes_n2[:, 1]
    largest = torch.stack(torch._foreach_max(scales))
    # torch has no _foreach_min: the smallest scale is minus the largest of the negated scales
    negated = torch._foreach_neg(scales)
    smallest = -torch.stack(torch._foreach_max(negated))
    return smallest, largest


def scale_dtype(spec: FormatSpec) -> torch.dtype:
    """Return the dtype in which engines and checkpoints hold the format's scales."""
    return getattr(torch, spec.scale_dtype)


def dead_scale(spec: FormatSpec, scale_format: ScaleFormat) -> float:
    """Return the scale of a dead block, that is, one whose amax is at the floor or below.

    A dead block causes no NaN, but it adds as good as nothing to an output until its weights grow.
    """
    floor = torch.tensor(spec.weight_amax_floor, device="cpu")  # on CPU, so that `item` does not wait for a device
    return scale_from_amax(floor, scale_format).item()
