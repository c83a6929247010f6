"""The e4m3 number format: a cast that saturates, power-of-two scales, and the round trip of a KV cache.

e4m3 (`torch.float8_e4m3fn`) has 4 exponent and 3 mantissa bits, no infinity, and a largest value of 448. Its use here
follows from two facts:

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
    """Cast `values` to e4m3. Overflow and infinities become +-448, NaN stays NaN. `values` are clamped in place."""
    # e4m3 has no infinity, and torch before 2.12 casts overflow to NaN. Without the clamp one element beyond its
    # scale's range would make every product with it NaN. The clamp lets NaN pass, so divergence stays visible
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def e4m3_values(codes: torch.Tensor, scale: torch.Tensor | float = 1.0, nan: bool = True) -> torch.Tensor:
    """Return the values of `codes` (or of their bytes) times `scale`, in FP32.

    Without `nan` the code of NaN becomes +-480, which saves a pass over the codes. On CPU the function is six times as
    fast as torch's cast, which is not vectorized.
    """
    # A code has the bits seeeemmm. `to(int16)` repeats the sign bit s to the left, so after a shift by 7 the bits are
    # sseeeemmm0000000. With its second bit cleared, s0eeeemmm0000000 is an FP16 number of the same mantissa. The bias
    # of the exponent is 15 in FP16 and 7 in e4m3, so the FP16 number is 2^-8 times the e4m3 number, also where both
    # are subnormal. Multiplying by 256 is exact
    halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    if nan:
        # In NaN's code all seven bits eeeemmm are set. Adding 1 to them carries into the cleared bit. Setting that bit
        # in the number itself makes it FP16's NaN
        halves |= (halves + 0x80).bitwise_and_(0x4000)
    return halves.view(torch.float16).float().mul_(256 * scale)


def ceil_pow2(values: torch.Tensor) -> torch.Tensor:
    """Round `values` (fp32, positive) up to powers of two. NaN and inf stay as they are."""
    # `frexp` reads the exponent's bits. `exp2(ceil(log2(x)))` would depend on how log2 rounds next to a power of two
    mantissa, _ = torch.frexp(values)  # values = mantissa * 2**exponent, mantissa in [0.5, 1)
    # The next power of two is 2**exponent, and this division is exact. torch's `ldexp` would multiply by
    # `pow(2, exponent)`, and on a GPU `pow` may be off in the last place. A value with mantissa 0.5 is a power of two
    is_rounded = torch.isfinite(values) & (mantissa > 0.5)
    return torch.where(is_rounded, values / mantissa, values)


def scale_from_amax(amax: torch.Tensor, scale_format: ScaleFormat = "pow2", amax_floor: float = 1e-12) -> torch.Tensor:
    """Return the fp32 scales (vLLM's `scale_inv`, by which codes are multiplied) of blocks with these `amax`.

    `"fp32"` gives amax / 448, `"pow2"` rounds this up to a power of two. NaN and infinity stay as they are. An amax
    below `amax_floor` counts as `amax_floor`, so dividing an all-zero block by its scale gives no NaN.
    """
    # 448 is a tensor, because on CUDA torch turns a division by a number into a product with its rounded reciprocal
    scale = amax.to(torch.float32).clamp_min(amax_floor) / torch.full((), E4M3_MAX, device=amax.device)
    return ceil_pow2(scale) if scale_format == "pow2" else scale


def cache_codes(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return the e4m3 codes that an FP8 KV cache with this `scale` stores for q, k or v, saturated at 448 * scale."""
    # The engine computes k and v in BF16, and rounds them to e4m3. So FP32 states are rounded to BF16 first here, too
    return saturating_cast_(states.detach().to(torch.bfloat16).float().div_(scale))


class PassGradient(torch.autograd.Function):
    """Computes `function(values)`, a rounding, and passes the gradient of the result to `values` unchanged
    (straight-through). The true gradient of a rounding is zero almost everywhere.
    """

    @staticmethod
    def forward(ctx, values: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(values)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def cache_round_trip(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return `states` as attention reads them from an FP8 KV cache, in their shape and dtype.

    The gradient passes unchanged, also to saturated elements (arXiv 2601.14243). The metric
    `fp8/kv_saturation_fraction` counts these.
    """
    if casts_in_hardware(states.device):
        from trl_fp8.quantization.kernels.cache_kernels import round_trip  # hosts without a GPU may have no Triton

        return PassGradient.apply(states, lambda states: round_trip(states, scale))

    def by_torch(states: torch.Tensor) -> torch.Tensor:
        codes = cache_codes(states, scale)
        return e4m3_values(codes, scale).to(states.dtype)

    return PassGradient.apply(states, by_torch)
