"""How far engine and trainer disagree about the tokens the engine sampled.

All of it is measured on raw ratios (before any bound) and on the mask before any rejection. Measured afterwards, the
same metrics fall to zero exactly when correction throws the evidence away. With log r as in `log_ratio.py`:

    k1_kl = mean(-log r)   k3_kl = mean(r - 1 - log r)      two estimates of KL(rollout || trainer), k3 never negative
    chi2_token = mean(r^2) - 1                              variance of the token ratio, if mean(r) = 1
    chi2_sequence = mean_i (prod_t r)^2 - 1                 the same of whole sequences; log ratios clamped at +-20
    ppl_ratio = mean_i exp(-mean_t log r)                   trainer perplexity / rollout perplexity, per sequence
    token_mult_prob_error = mean(exp|log r|)                1 is perfect; NeMo-RL's alarm metric
    effective_sample_size = (sum r)^2 / (n sum r^2)         1 is perfect, 1/n is one token deciding everything

Error that accumulates in an FP8 KV cache grows along a completion: k3_kl is also given by position, by completion
length, and as `late_over_early`, in the second half of each completion relative to the first.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from operator import add

import torch
from torch import Tensor

from trl_fp8.run.log_ratio import LOG_RATIO_BOUND, LogRatio
from trl_fp8.run.metric import Metric, effective_sample_size, highest, lowest, mean_of, quotient

from .tally import Tally, highest_of, lowest_of


# Powers of four: the last bin is open. Fixed, so that ranks and steps agree on the vector's layout.
BIN_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
BIN_NAMES = tuple(f"{a}-{b - 1}" for a, b in pairwise(BIN_EDGES)) + (f"{BIN_EDGES[-1]}+",)


def mismatch_tally(ratio: LogRatio) -> Tally:
    """Sums of one batch on one rank, on the device. `summarize_mismatch` makes metrics of them, merged over ranks."""
    log_r_BT = ratio.values_BT.double()
    k3_BT = torch.expm1(log_r_BT) - log_r_BT
    distance_BT = log_r_BT.abs()
    log_r_B = log_r_BT.sum(dim=-1)
    scored_B = ratio.scored_BT.any(dim=-1)
    over_tokens = {
        "tokens": ratio.mask_BT.sum(),
        "scored": ratio.scored_BT.sum(),
        "missing": ratio.missing_BT.sum(),
        "broken": ratio.broken_BT.sum(),
        "clamped": ratio.clamped_BT.sum(),
        "log_r": log_r_BT.sum(),
        "k3": k3_BT.sum(),
        "distance": distance_BT.sum(),
        "mult_error": torch.where(ratio.scored_BT, distance_BT.exp(), 0.0).sum(),
    }
    return (
        Tally.of(over_tokens, maxima={"distance_max": highest_of(distance_BT, ratio.scored_BT)})
        | _ratio_tally("token", log_r_BT, ratio.scored_BT)
        | _ratio_tally("sequence", log_r_B.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), scored_B)
        | _ratio_tally("geometric", log_r_B / ratio.scored_BT.sum(dim=-1).clamp(min=1), scored_B)
        | _growth_tally(ratio, k3_BT)
    )


def _ratio_tally(level: str, log_r: Tensor, scored: Tensor) -> Tally:
    """Sums of the ratios at one level, over tokens [B, T] or sequences [B] that are scored."""
    r = log_r.exp()
    return Tally.of(
        {
            f"{level}.count": scored.sum(),
            f"{level}.r": torch.where(scored, r, 0.0).sum(),
            f"{level}.r_squared": torch.where(scored, r.square(), 0.0).sum(),
            f"{level}.r_inverse": torch.where(scored, torch.exp(-log_r), 0.0).sum(),
        },
        minima={f"{level}.r_min": lowest_of(r, scored)},
        maxima={f"{level}.r_max": highest_of(r, scored)},
    )


def _growth_tally(ratio: LogRatio, k3_BT: Tensor) -> Tally:
    """Sums of k3 and of scored tokens, by position, by completion length, and by half of the completion."""
    scored_BT, mask_BT = ratio.scored_BT.double(), ratio.mask_BT
    length_B1 = mask_BT.sum(dim=-1, keepdim=True)
    is_late_BT = 2 * (mask_BT.cumsum(dim=-1) - 1) >= length_B1  # tokens the policy wrote; tool output has no half
    parts = [("late", k3_BT, scored_BT, is_late_BT), ("early", k3_BT, scored_BT, ~is_late_BT)]
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    by_position = (position_T, k3_BT.sum(dim=0), scored_BT.sum(dim=0))
    by_length = (length_B1.squeeze(-1), k3_BT.sum(dim=-1), scored_BT.sum(dim=-1))
    for axis, (where, k3, scored) in (("position", by_position), ("length", by_length)):
        for name, low, high in zip(BIN_NAMES, BIN_EDGES, (*BIN_EDGES[1:], math.inf), strict=True):
            parts.append((f"{axis}.{name}", k3, scored, (where >= low) & (where < high)))
    sums = {f"{name}.k3": (k3 * inside).sum() for name, k3, _, inside in parts}
    return Tally.of(sums | {f"{name}.scored": (scored * inside).sum() for name, _, scored, inside in parts})


def summarize_mismatch(sums: Mapping[str, float]) -> dict[str, Metric]:
    """Metrics from `Tally.read()` of a tally that contains a `mismatch_tally`. A mean over nothing is NaN."""

    def mean(name: str, count: str = "scored") -> Metric:
        return mean_of(sums[name], sums[count])

    def variance(level: str, count: str) -> Metric:
        return Metric((sums[f"{level}.r_squared"], sums[count]), add, _variance)

    halves = tuple(sums[name] for name in ("late.k3", "late.scored", "early.k3", "early.scored"))
    metrics = {
        "mismatch/k1_kl": mean_of(-sums["log_r"], sums["scored"]),
        "mismatch/k3_kl": mean("k3"),
        "mismatch/chi2_token": variance("token", "scored"),
        "mismatch/chi2_sequence": variance("sequence", "sequence.count"),
        "mismatch/ppl_ratio": mean("geometric.r_inverse", "geometric.count"),
        "mismatch/token_mult_prob_error": mean("mult_error"),
        "mismatch/logp_difference_mean": mean("distance"),
        "mismatch/logp_difference_max": highest(sums["distance_max"]),
        "mismatch/late_over_early": Metric(halves, add, _growth),
        "mismatch/fraction_missing": mean("missing", "tokens"),
        "mismatch/fraction_broken": mean("broken", "tokens"),
        "mismatch/fraction_clamped": mean("clamped"),
    }
    for level, prefix in (("token", ""), ("sequence", "sequence_"), ("geometric", "geometric_")):
        count, total, squared = (sums[f"{level}.{name}"] for name in ("count", "r", "r_squared"))
        metrics |= {
            f"correction/{prefix}ratio_min": lowest(sums[f"{level}.r_min"]),
            f"correction/{prefix}ratio_mean": mean_of(total, count),
            f"correction/{prefix}ratio_max": highest(sums[f"{level}.r_max"]),
            f"correction/{prefix}effective_sample_size": effective_sample_size(total, squared, count),
        }
    for axis in ("position", "length"):
        for name in BIN_NAMES:
            if sums[f"{axis}.{name}.scored"]:
                metrics[f"mismatch/k3_kl/{axis}_{name}"] = mean(f"{axis}.{name}.k3", f"{axis}.{name}.scored")
    return metrics


def _variance(squares: float, count: float) -> float:
    return quotient(squares, count) - 1


def _growth(late_k3: float, late: float, early_k3: float, early: float) -> float:
    return quotient(quotient(late_k3, late), quotient(early_k3, early))
