"""Magnitudes of q, k and v, and the per-tensor scales of an FP8 KV cache, made from the largest ones.

A scale one step too small saturates K and destroys the attention (measured on a tiny Qwen3: mean log-prob difference
0.06 -> 5.0). One several steps too large costs next to nothing: e4m3's relative error is the same anywhere in its
normal range. Hence a scale is made from amax times a margin and rounded up to a power of two, which is exact in BF16,
too (vLLM reads a checkpoint's scales as BF16).

Shape letters: L layers, B sequences, H heads, G KV heads, T tokens, D head size.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import log

import torch

from trl_fp8.quantization.formats import E4M3_MAX

from .e4m3 import ceil_pow2


QKV = ("q", "k", "v")
KV_SCALES = "KV cache scales"  # their name in a sync

# Root mean square of e4m3's relative rounding error: a step of 1/8 of the binade, uniform error, log-uniform mantissa
E4M3_RELATIVE_ERROR = (1 / 8) / 12**0.5 * (3 / 8 / log(2)) ** 0.5
# Attention logits that are off by this much (root mean square) change softmax weights by as many percent. An ordinary
# layer is at 0.02 - 0.05; a K bias of 100 on two of 128 channels brings a tiny Qwen2 to 0.3 and its mismatch to five
# times (benchmarks/results/kv_cache_cpu.json, "k_bias").
LOGIT_ERROR_LIMIT = 0.15


@dataclass(frozen=True)
class KVScales:
    """Scales of q, k and v per layer: `x` is held as `e4m3(x / s) * s`."""

    values: torch.Tensor  # fp32 `[L, 3]` on CPU, columns as in QKV; positive powers of two, or 0: see `layers`

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that have scales. Rows of others, which cache no k and v, are 0."""
        return tuple(self.values[:, 0].nonzero().flatten().tolist())

    def scale(self, layer: int, which: str) -> float:
        return self.values[layer, QKV.index(which)].item()


def add_magnitudes(
    states: torch.Tensor,
    real_BT: torch.Tensor,
    amax: torch.Tensor,
    elements: torch.Tensor,
    limit: torch.Tensor | None = None,
    beyond: torch.Tensor | None = None,
) -> None:
    """Add the magnitudes of q, k or v of an attention call to those of other calls. Does not synchronize.

    Args:
        states: `[B, H, T, D]`, floating point, any strides.
        real_BT: Which tokens count, bool, any strides.
        amax: 0-d, fp32, not negative; raised to the largest magnitude; NaN counts as the largest.
        elements: 0-d, fp64; the number of elements is added.
        limit: 0-d, fp32, exact in the dtype of `states`.
        beyond: With `limit`: 0-d, fp64; the number of elements whose magnitude is above it is added.
    """
    if states.is_cuda:
        from trl_fp8.quantization.kernels.cache_kernels import add_magnitudes as by_kernel  # needs Triton

        by_kernel(states, real_BT, amax, elements, limit, beyond)
        return
    padded_BT = ~real_BT
    values = states.abs()  # vector_norm needs no temporary, but takes ten times as long on CPU
    # Padding is masked in the results `[B, T]`: to mask it in the states would copy them once more
    largest = values.amax((1, 3)).masked_fill_(padded_BT, 0).amax().float()
    torch.maximum(amax, largest, out=amax)
    elements.add_(real_BT.sum() * (values.shape[1] * values.shape[3]))
    if limit is not None:
        beyond_BT = values.gt_(limit).sum((1, 3), dtype=torch.float32)  # `gt_` writes ones and zeros
        beyond.add_(beyond_BT.masked_fill_(padded_BT, 0).sum())


def kv_scales_from_amax(
    amax_L3: torch.Tensor, margin: float = 1.05, layers: Collection[int] | None = None
) -> KVScales:
    """Return scales that hold `margin * amax` without saturating: amax / 448 as in vLLM's checkpoints, rounded up.

    Args:
        amax_L3: Largest magnitudes `[L, 3]` of q, k, v (after normalization and RoPE) over all ranks, on any device.
        margin: Headroom for tokens that were not observed, at least 1.
        layers: Numbers of the layers that cache k and v; the others get none. None: all.

    Raises `ValueError` naming layers whose amax is NaN, infinite or zero: no default scale would be safe.
    """
    amax = amax_L3.detach().float().cpu()
    cached = torch.ones(len(amax), dtype=torch.bool)
    if layers is not None:
        cached = torch.zeros_like(cached).index_fill(0, torch.tensor(list(layers), dtype=torch.long), True)
    bad = ~(torch.isfinite(amax) & (amax > 0)) & cached[:, None]
    if bad.any():
        offenders = [f"layer {layer} {QKV[column]} (amax {amax[layer, column]:g})" for layer, column in bad.nonzero()]
        more = f", and {len(offenders) - 6} more" if len(offenders) > 6 else ""
        raise ValueError(
            f"KV cache scales cannot be calibrated: {', '.join(offenders[:6])}{more}. A NaN or infinite value means "
            "that the policy's forward diverged (check loss and grad_norm of the last steps); zero means that the "
            "layer was never run on a real token. kv_cache_dtype='auto' trains without an FP8 KV cache."
        )
    return KVScales(ceil_pow2(amax * margin / E4M3_MAX).where(cached[:, None], 0))


def logit_error(q_squares_HD: torch.Tensor, k_squares_GD: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the root mean square error of attention logits expected from rounding k to e4m3, for the worst head.

    `q_squares_HD` and `k_squares_GD` are mean squares per head and channel, over tokens; H is a multiple of G.
    """
    # Each element of k is off by E4M3_RELATIVE_ERROR of itself, independently, and is multiplied by q's. k's largest
    # magnitude over its root mean square says less: one outlier channel of D brings it to sqrt(D), whatever its size
    k_squares_HD = k_squares_GD.repeat_interleave(q_squares_HD.shape[0] // k_squares_GD.shape[0], 0)
    return scaling * E4M3_RELATIVE_ERROR * (q_squares_HD * k_squares_HD).sum(-1).sqrt().amax()


def outlier_layers(logit_error_L: torch.Tensor) -> dict[int, float]:
    """Return `logit_error` of the layers that exceed its limit: their k has outliers that e4m3 keeps badly."""
    return {layer: error for layer, error in enumerate(logit_error_L.tolist()) if error > LOGIT_ERROR_LIMIT}
