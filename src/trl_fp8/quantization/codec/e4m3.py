"""The e4m3 number format: a cast that saturates, power-of-two scales, and the round trip of a KV cache.

e4m3 (`torch.float8_e4m3fn`) has 4 exponent and 3 mantissa bits, no infinity, and a largest value of 448. Two facts
decide how it is used here:

- A cast rounds to nearest even, so an element in the normal range is off by at most 1/16 of itself, and an element at
  the top of the range (256 .. 448, spacing 32) by at most 16, both in units of the scale.
- An e4m3 value times a power of two has 4 significant bits, so it is exact in BF16. With power-of-two scales the
  dequantized operands of an FP8 GEMM can therefore be fed to an ordinary BF16 GEMM without a second rounding.
"""

from collections.abc import Callable

import torch

from trl_fp8.quantization.formats import E4M3_MAX, ScaleFormat


E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu  # a power of two, as the byte of its exponent; 255 is NaN


def casts_in_hardware(device: torch.device) -> bool:
    """Return whether `device` is an NVIDIA GPU with e4m3 instructions, which Triton needs: Ada (8.9) or later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def saturating_cast_(values: torch.Tensor) -> torch.Tensor:
    """Cast `values` to e4m3: overflow and infinities go to +-448, NaN stays NaN. Clamps in place."""
    # e4m3 has no infinity, and torch before 2.12 casts overflow to NaN: one element beyond its scale's
    # range would make every product with it NaN. The clamp lets NaN pass, so that divergence stays visible
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def e4m3_values(codes: torch.Tensor, scale: torch.Tensor | float = 1.0, nan: bool = True) -> torch.Tensor:
    """Return the numbers that `codes` (or their bytes) stand for, times `scale`, in FP32; without `nan`, NaN is +-480.

    Six times as fast on CPU as torch's cast, which is not vectorized.
    """
    # A code has the bits seeeemmm. Shifted by 7, with a zero between the sign and the rest, they are s0eeeemmm0000000,
    # an FP16 number of the same mantissa. FP16's exponent has a bias of 15 where e4m3's is 7: the number is 2^-8 times
    # as large, also where both are subnormal, and the factor 256 is exact
    halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    if nan:  # NaN is the code with all 7 bits set: adding one carries into the zero, which fills FP16's exponent
        halves |= (halves + 0x80).bitwise_and_(0x4000)
    return halves.view(torch.float16).float().mul_(256 * scale)


def ceil_pow2(values: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two not below each of `values` (fp32, positive; NaN and inf pass through)."""
    # By exponent bits: `exp2(ceil(log2(x)))` would depend on how log2 rounds next to a power of two
    mantissa, exponent = torch.frexp(values)  # values = mantissa * 2**exponent, mantissa in [0.5, 1)
    # The next power of two is 2**exponent. A value with mantissa 0.5 is a power of two itself
    power = torch.ldexp(torch.ones_like(values), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(torch.isfinite(values), power, values)


def scale_from_amax(amax: torch.Tensor, scale_format: ScaleFormat = "pow2", amax_floor: float = 1e-12) -> torch.Tensor:
    """Return the fp32 multiplier that dequantizes (vLLM's `scale_inv`) blocks whose largest magnitude is `amax`.

    `"fp32"` gives amax / 448, `"pow2"` the next power of two; what is not finite stays so. `amax_floor`, the smallest
    amax, gives an all-zero block a scale that divides without NaN.
    """
    # By a tensor: on CUDA, torch turns a division by a number into a product with its rounded reciprocal
    scale = amax.to(torch.float32).clamp_min(amax_floor) / torch.full((), E4M3_MAX, device=amax.device)
    return ceil_pow2(scale) if scale_format == "pow2" else scale


def cache_codes(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return the e4m3 codes that an FP8 KV cache with one `scale` stores for q, k or v, saturating at 448 * scale."""
    # The engine computes k and v in BF16: FP32 states are rounded twice here, as they are there
    return saturating_cast_(states.detach().to(torch.bfloat16).float().div_(scale))


class _StraightThrough(torch.autograd.Function):
    """A rounding that passes the gradient on unchanged, where its own would be zero almost everywhere."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounding(values)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def cache_round_trip(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return `states` as attention reads them from an FP8 KV cache, in their shape and dtype.

    The gradient passes unchanged, also that of saturated elements (arXiv 2601.14243), which
    `fp8/kv_saturation_fraction` counts.
    """
    if casts_in_hardware(states.device):
        from trl_fp8.quantization.kernels.cache_kernels import round_trip  # hosts without a GPU may have no Triton

        return _StraightThrough.apply(states, lambda s: round_trip(s, scale))
    return _StraightThrough.apply(states, lambda s: e4m3_values(cache_codes(s, scale), scale).to(s.dtype))
