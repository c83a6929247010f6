"""Magnitudes of q, k and v, and the scales of an FP8 KV cache, one per tensor, made from the largest magnitudes.

A halved scale saturates K and destroys the attention (measured on a tiny Qwen3: the mean log-prob difference rises
from 0.06 to 5.0). A scale that is 8 times too large costs next to nothing, because e4m3's relative error is the same
anywhere in its normal range. So a scale is made from amax times a margin, and rounded up to a power of two. Powers of
two are exact in BF16, too, in which vLLM reads a checkpoint's scales.

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

# Root mean square (rms) of e4m3's relative rounding error. A number m 2^e, 1 <= m < 2, is rounded in steps of 2^e / 8.
# An error that is uniform within a step has the rms step / sqrt(12), which is 1 / (8 m sqrt(12)) of the number. The
# mean of 1 / m^2 over a log-uniform m is 3 / (8 log 2)
E4M3_RELATIVE_ERROR = (1 / 8) / 12**0.5 * (3 / 8 / log(2)) ** 0.5
# Largest rms error of attention logits that is not reported. An error of 0.15 changes softmax weights by 15 %.
# Ordinary layers have 0.02 - 0.05. In a tiny Qwen2 a K bias of 100 on two of 128 channels raises the error to 0.3, and
# the mismatch to five times what it was (benchmarks/results/kv_cache_cpu.json, "k_bias")
LOGIT_ERROR_LIMIT = 0.15


@dataclass(frozen=True)
class KVScales:
    """Scales of q, k and v for each layer. With the scale s a value x becomes `e4m3(x / s) * s`."""

    values: torch.Tensor  # fp32 `[L, 3]` on CPU, columns as in QKV; powers of two, or 0 in layers without k and v

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

        by_kernel(states, real_BT, amax, elements, limit, beyond)
        return
    padded_BT = ~real_BT
    values = states.abs()  # vector_norm needs no temporary, but takes ten times as long on CPU
    # Mask padding in the results `[B, T]`, because masking it in the states would copy them once more
    largest = values.amax((1, 3)).masked_fill_(padded_BT, 0).amax().float()
    torch.maximum(amax, largest, out=amax)
    elements.add_(real_BT.sum() * (values.shape[1] * values.shape[3]))
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
    """Return the expected rms error of attention logits that rounding k to e4m3 causes in the worst head.

    `q_squares_HD` and `k_squares_GD` are mean squares per head and channel, over tokens; H is a multiple of G.
    """
    # Each element of k is off by E4M3_RELATIVE_ERROR of itself, independently of others, and is multiplied by an
    # element of q. A simpler measure, the largest |k| over the rms of k, would not do: one dominant channel already
    # raises it to sqrt(D), even if q is small there
    k_squares_HD = k_squares_GD.repeat_interleave(q_squares_HD.shape[0] // k_squares_GD.shape[0], 0)
    return scaling * E4M3_RELATIVE_ERROR * (q_squares_HD * k_squares_HD).sum(-1).sqrt().amax()


def outlier_layers(logit_error_L: torch.Tensor) -> dict[int, float]:
    """Return layer -> `logit_error` of layers above the limit. Their k has outliers, which e4m3 rounds badly."""
    return {layer: error for layer, error in enumerate(logit_error_L.tolist()) if error > LOGIT_ERROR_LIMIT}
