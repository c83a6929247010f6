"""What scales are made of: e4m3's largest value, formats of scales, and the smallest amax that engines assume."""

from typing import Literal, NamedTuple


E4M3_MAX = 448.0  # largest value of e4m3 (`torch.float8_e4m3fn`), which has no infinity

ScaleFormat = Literal["pow2", "fp32"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("pow2", "fp32")

# Where vLLM's activation kernels floor amax (csrc/quantization/w8a8/fp8/per_token_group_quant.cu): below any that
# matters, only to keep an all-zero group from dividing by zero
ACTIVATION_AMAX_FLOOR = 1e-10
# Where the scale, and not amax, is floored, at 1 / (448 * 512): by vLLM's torch path (QuantFP8.forward_native) and by
# its kernel that fuses an activation function with the quantization (silu_and_mul_per_block_quant)
FLOORED_SCALE_AMAX = 1 / 512


class ActivationScaling(NamedTuple):
    """How an engine quantizes activations."""

    scale_format: ScaleFormat  # "pow2" (DeepGEMM) or "fp32" (CUTLASS, Triton)
    amax_floor: float = ACTIVATION_AMAX_FLOOR  # smallest amax that a scale is made from
    scope: str = "group"  # what shares a scale: "group" (elements of a token), "token" or "tensor" (the batch)
    reciprocal: bool = False  # the engine multiplies by a scale's rounded reciprocal where others divide


def check_scale_format(scale_format: str) -> None:
    """Raise `ValueError` for an unknown format of scales."""
    if scale_format not in SCALE_FORMATS:
        raise ValueError(
            f"scale_format={scale_format!r} is not a scale format: expected 'pow2' (a power of two, exact in BF16) or "
            "'fp32' (amax / 448, one rounding less but inexact in BF16)."
        )
