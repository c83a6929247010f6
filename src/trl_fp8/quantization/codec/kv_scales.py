"""Magnitudes of q, k and v, and the scales of an FP8 KV cache, one per tensor, made from the largest magnitudes.

    scale = margin * amax / 448, rounded up to a power of two

A scale that is too small is harmful: half of the right scale saturates k and destroys the attention (measured on a
tiny Qwen3: the mean log-prob difference rises from 0.06 to 5.0). A scale that is 8 times too large costs next to
nothing, because e4m3's relative error is the same anywhere in its normal range. So the formula has a margin and rounds
up. vLLM reads a checkpoint's scales in BF16, in which powers of two are exact.

Shape letters: L layers, B sequences, H heads, G KV heads, T tokens, D head size.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import log

import torch

from trl_fp8.quantization.formats import E4M3_MAX

from .e4m3 import ceil_pow2


QKV = ("q", "k", "v")
KV_SCALES = "KV cache scales"  # name of the scales as a `CarriedValue` (sync/records.py)

# Root mean square (rms) of e4m3's relative rounding error
# 1. A number m 2^e, 1 <= m < 2, is rounded in steps of 2^e / 8
# 2. An error that is uniform within a step has the rms step / sqrt(12), which is 1 / (8 m sqrt(12)) of the number
# 3. The mean of 1 / m^2 over a log-uniform m is 3 / (8 log 2)
E4M3_RELATIVE_ERROR = (1 / 8) / 12**0.5 * (3 / 8 / log(2)) ** 0.5
# Largest rms error of attention logits that is not reported. An error of 0.15 changes softmax weights by 15 %.
# Ordinary layers have 0.02 - 0.05. In a tiny Qwen2 a K bias of 100 on two of 128 channels raises the error to 0.3, and
# the mismatch to five times what it was (benchmarks/results/kv_cache_cpu.json, "k_bias")
LOGIT_ERROR_LIMIT = 0.15


@dataclass(frozen=True)
class KVScales:
    """Scales of q, k and v for each layer. With the scale s a value x becomes `e4m3(x / s) * s`."""

    # fp32 `[L, 3]` on CPU, columns as in QKV; powers of two, or 0 in layers that cache no k and v
    values: torch.Tensor

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that have scales. Rows of layers that cache no k and v are 0."""
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
    """Update `amax`, `elements` and `beyond` in place with q, k or v of one attention call. Does not synchronize.

    Args:
        states: q, k or v, `[B, H, T, D]`, floating point, any strides.
        real_BT: False at padding, which does not count, bool, any strides.
        amax: 0-d, fp32, not negative. Becomes the largest magnitude seen so far; NaN counts as the largest.
        elements: 0-d, fp64. The number of elements at real tokens is added.
        limit: 0-d, fp32, a number that the dtype of `states` represents exactly. None: `beyond` is not updated.
        beyond: 0-d, fp64. The number of these elements whose magnitude is above `limit` is added.
    """
    if states.is_cuda:
        from trl_fp8.quantization.kernels.cache_kernels import add_magnitudes as by_kernel  # needs Triton

        by_kernel(states, real_BT, amax, elements, limit=limit, beyond=beyond)
        return
    padded_BT = ~real_BT
    values = states.abs()  # vector_norm needs no temporary, but takes ten times as long on CPU
    # Mask padding in the results `[B, T]`, because masking it in the states would copy them once more
    largest_BT = values.amax((1, 3)).masked_fill_(padded_BT, 0)
    torch.maximum(amax, largest_BT.amax().float(), out=amax)
    _, heads, _, head_size = values.shape
    elements.add_(real_BT.sum() * (heads * head_size))
    if limit is not None:
        beyond_BT = values.gt_(limit).sum((1, 3), dtype=torch.float32)  # `gt_` writes ones and zeros
        beyond.add_(beyond_BT.masked_fill_(padded_BT, 0).sum())


def kv_scales_from_amax(
    amax_L3: torch.Tensor, margin: float = 1.05, layers: Collection[int] | None = None
) -> KVScales:
    """Return margin * amax / 448, rounded up to powers of two. Magnitudes up to margin * amax do not saturate.

    Args:
        amax_L3: Largest magnitudes `[L, 3]` of q, k, v (after normalization and RoPE) over all ranks, on any device.
        margin: Factor of at least 1, because tokens that were not observed may have larger magnitudes.
        layers: Numbers of the layers that cache k and v; other layers get no scales. None: all layers.

    Raises:
        ValueError: The amax of some layer is NaN, infinite or zero. There is no default scale that would be safe.
    """
    amax = amax_L3.detach().float().cpu()
    if layers is None:
        cached = torch.ones(len(amax), 1, dtype=torch.bool)
    else:
        cached = torch.zeros(len(amax), 1, dtype=torch.bool)
        cached[torch.tensor(list(layers), dtype=torch.long)] = True
    usable = torch.isfinite(amax) & (amax > 0)
    bad = ~usable & cached
    if bad.any():
        offenders = [f"layer {layer} {QKV[column]} (amax {amax[layer, column]:g})" for layer, column in bad.nonzero()]
        more = f", and {len(offenders) - 6} more" if len(offenders) > 6 else ""
        raise ValueError(
            f"KV cache scales cannot be calibrated: {', '.join(offenders[:6])}{more}. A NaN or infinite value means "
            "that the policy's forward diverged (check loss and grad_norm of the last steps); zero means that the "
            "layer was never run on a real token. kv_cache_dtype='auto' trains without an FP8 KV cache."
        )
    smallest = torch.finfo(torch.float32).tiny  # a subnormal amax over 448 may be 0, by which codes would be divided
    scales = ceil_pow2((amax * margin / E4M3_MAX).clamp_min(smallest))
    return KVScales(scales.where(cached, 0))


def logit_error(q_squares_HD: torch.Tensor, k_squares_GD: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the expected rms error of attention logits that rounding k to e4m3 causes in the worst head.

    `q_squares_HD` and `k_squares_GD` are mean squares per head and channel, over tokens; H is a multiple of G.
    """
    # A logit is scaling * sum over D of q k. Each element of k is off by E4M3_RELATIVE_ERROR of itself, independently
    # of other elements, so the squares of the errors add up
    # A simpler measure, the largest |k| over the rms of k, would mislead: one dominant channel of k raises it to
    # sqrt(D), even if q is small in this channel
    heads_of_a_k = q_squares_HD.shape[0] // k_squares_GD.shape[0]
    k_squares_HD = k_squares_GD.repeat_interleave(heads_of_a_k, 0)
    error_H = scaling * E4M3_RELATIVE_ERROR * (q_squares_HD * k_squares_HD).sum(-1).sqrt()
    return error_H.amax()


def outlier_layers(logit_error_L: torch.Tensor) -> dict[int, float]:
    """Return layer -> `logit_error` of the layers above `LOGIT_ERROR_LIMIT`, whose k has outliers."""
    return {layer: error for layer, error in enumerate(logit_error_L.tolist()) if error > LOGIT_ERROR_LIMIT}
