"""What a tensor looks like after the engine's KV cache: an e4m3 round trip with a per-tensor scale, straight through.

    forward:   x -> bf16 -> e4m3(x / s) -> * s     the bytes that the engine's cache holds, read back
    backward:  dx = dy                             rounding has no useful derivative (straight-through estimator)

The engine computes k and v in BF16, so a trainer in FP32 has to round twice as well to end on the same byte. With a
power-of-two scale, dividing and multiplying are exact, and the result is exact in BF16.
"""

from collections.abc import Callable

import torch

from .e4m3 import saturating_cast_


def cache_codes(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """The e4m3 codes under which an FP8 KV cache stores q, k or v: rounded to nearest even, saturating at 448 * scale
    (a positive number, or an fp32 tensor with one element on the same device).
    """
    return saturating_cast_(states.detach().to(torch.bfloat16).float().div_(scale))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounding(values)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def straight_through(values: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`rounding(values)`, of the same shape; the gradient passes unchanged."""
    return _StraightThrough.apply(values, rounding)


def cache_round_trip(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """`states` as attention reads them from an FP8 KV cache: same shape and dtype; the gradient passes unchanged.

    Elements beyond 448 * scale come back as 448 * scale and pass their gradient too, as in the straight-through
    estimator of arXiv 2601.14243; `fp8/kv_saturation_fraction` counts them.
    """
    return straight_through(states, lambda s: cache_codes(s, scale).float().mul_(scale).to(s.dtype))
