"""Metrics of a batch: how far engine and trainer disagree about sampled tokens, and what a correction changed.

The mismatch is measured on raw ratios (before any bound) and on the mask before any rejection. Measured afterwards, it
would fall to zero exactly when correction throws the evidence away. With log r as in `run/batch.py`:

    k1_kl = mean(-log r)   k3_kl = mean(r - 1 - log r)      two estimates of KL(rollout || trainer), k3 never negative
    chi2_token = mean(r^2) - 1                              variance of the token ratio, if mean(r) = 1
    chi2_sequence = mean_i (prod_t r)^2 - 1                 the same of whole sequences; log ratios clamped at +-20
    ppl_ratio = mean_i exp(-mean_t log r)                   trainer perplexity / rollout perplexity, per sequence
    token_mult_prob_error = mean(exp|log r|)                1 is perfect; NeMo-RL's alarm metric
    effective_sample_size = (sum r)^2 / (n sum r^2)         1 is perfect, 1/n is one token deciding everything

Error that accumulates in an FP8 KV cache grows along a completion: k3_kl is also given by position, by completion
length, and as `late_over_early`, in the second half of each completion relative to the first.

A metric averaged per rank and then over ranks is wrong as soon as ranks hold different numbers of tokens, and a
`.item()` per metric costs a synchronization each. So the parts of these metrics are tensors on the device, and
`measured` merges all of them over ranks and reads them at once.
"""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from operator import add

import torch
from torch import Tensor
from torch.nn import functional as F

from trl_fp8.run.batch import (
    LOG_RATIO_BOUND,
    LogRatio,
    Metric,
    effective_sample_size,
    highest,
    lowest,
    mean_of,
    quotient,
)


# Powers of four: the last bin is open. Fixed, so that ranks and steps agree on which metrics there are.
BIN_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
BIN_NAMES = tuple(f"{a}-{b - 1}" for a, b in pairwise(BIN_EDGES)) + (f"{BIN_EDGES[-1]}+",)
OF_ALL_RANKS = ("correction/batch_norm_factor", "correction/log_centre")  # the same on every rank already


def measured(
    metrics: Mapping[str, Metric], gather: Callable[[Tensor], Tensor] = lambda values: values
) -> dict[str, Metric]:
    """Merge metrics over ranks; their parts are 0-d tensors of this rank. One collective, one synchronization.

    `gather` concatenates or stacks a 1-D tensor over ranks. Bins without a token are left out.
    """
    parts = torch.stack([part.double() for metric in metrics.values() for part in metric.parts])
    of_ranks = gather(parts).reshape(-1, len(parts))
    merged = torch.stack([of_ranks.sum(dim=0), of_ranks.amin(dim=0), of_ranks.amax(dim=0)], dim=1)
    rows = iter(merged.tolist())
    found = {}
    for name, metric in metrics.items():
        column = (add, min, max).index(metric.merge)
        found[name] = Metric(tuple(next(rows)[column] for _ in metric.parts), metric.merge, metric.formula)
        if "/k3_kl/" in name and not found[name].parts[1]:
            del found[name]
        elif name in OF_ALL_RANKS:  # a mean over batches
            found[name] = mean_of(found[name].value)
    if masked := found.get("correction/fraction_masked_tokens"):
        unused, tokens = masked.parts
        found["correction/all_rejected"] = mean_of(float(tokens > 0 and unused == tokens))
    return found


def mismatch_metrics(ratio: LogRatio) -> dict[str, Metric]:
    """Return `mismatch/*` and the raw ratios in `correction/*`, of one batch on one rank. Means of nothing are NaN."""
    log_r_BT = ratio.values_BT.double()
    k3_BT = torch.expm1(log_r_BT) - log_r_BT
    distance_BT = log_r_BT.abs()
    log_r_B = log_r_BT.sum(dim=-1)
    scored_B = ratio.scored_BT.any(dim=-1)
    mean_log_r_B = log_r_B / ratio.scored_BT.sum(dim=-1).clamp(min=1)
    tokens, scored = ratio.mask_BT.sum(), ratio.scored_BT.sum()
    chi2_token, of_tokens = _ratio_metrics("", log_r_BT, ratio.scored_BT)
    log_product_B = log_r_B.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    chi2_sequence, of_sequences = _ratio_metrics("sequence_", log_product_B, scored_B)
    _, of_means = _ratio_metrics("geometric_", mean_log_r_B, scored_B)
    metrics = {
        "mismatch/k1_kl": mean_of(-log_r_BT.sum(), scored),
        "mismatch/k3_kl": mean_of(k3_BT.sum(), scored),
        "mismatch/chi2_token": chi2_token,
        "mismatch/chi2_sequence": chi2_sequence,
        "mismatch/ppl_ratio": mean_of(_sum_of(torch.exp(-mean_log_r_B), scored_B), scored_B.sum()),
        "mismatch/token_mult_prob_error": mean_of(_sum_of(distance_BT.exp(), ratio.scored_BT), scored),
        "mismatch/logp_difference_mean": mean_of(distance_BT.sum(), scored),
        "mismatch/logp_difference_max": highest(-_lowest_of(-distance_BT, ratio.scored_BT)),
        "mismatch/fraction_missing": mean_of(ratio.missing_BT.sum(), tokens),
        "mismatch/fraction_broken": mean_of(ratio.broken_BT.sum(), tokens),
        "mismatch/fraction_clamped": mean_of(ratio.clamped_BT.sum(), scored),
    }
    return metrics | of_tokens | of_sequences | of_means | _growth_metrics(ratio, k3_BT)


def correction_metrics(
    mask_BT: Tensor,  # tokens that are trained on, before rejection
    weights_BT: Tensor,  # after bound and normalization
    keep_BT: Tensor,  # tokens that all rejection rules accept
    keep_by: Mapping[str, Tensor],  # tokens that each rule accepts
    counted_BT: Tensor,  # tokens that the loss averages over
) -> dict[str, Metric]:
    """Return the metrics of a correction of one batch on one rank.

    All is counted against the tokens and sequences *before* rejection, so that a correction which drops most of a
    batch reads as one that drops most of a batch. A token is masked if it is not kept or its weight is 0.
    """
    used_BT = torch.where(keep_BT, weights_BT, 0.0).double()
    tokens, sequences = mask_BT.sum(), mask_BT.any(dim=-1).sum()
    masked_tokens = tokens - (used_BT > 0).sum()
    masked_sequences = sequences - (used_BT > 0).any(dim=-1).sum()
    total = used_BT.sum()
    metrics = {
        "correction/fraction_masked_tokens": mean_of(masked_tokens, tokens),
        "correction/fraction_masked_sequences": mean_of(masked_sequences, sequences),
        "correction/weight_min": lowest(_lowest_of(used_BT, counted_BT)),
        "correction/weight_mean": mean_of(total, counted_BT.sum()),
        "correction/weight_max": highest(-_lowest_of(-used_BT, counted_BT)),
        "correction/effective_sample_size_used": effective_sample_size(total, used_BT.square().sum(), tokens),
    }
    for rule, kept_BT in keep_by.items():
        metrics[f"correction/fraction_rejected/{rule}"] = mean_of((mask_BT & ~kept_BT).sum(), tokens)
    return metrics


def _ratio_metrics(prefix: str, log_r: Tensor, scored: Tensor) -> tuple[Metric, dict[str, Metric]]:
    """Return chi2 and metrics of the ratios of scored tokens [B, T] or sequences [B]; `prefix` is in their names."""
    r = log_r.exp()
    count = scored.sum()
    total = _sum_of(r, scored)
    squares = _sum_of(r.square(), scored)
    return Metric((squares, count), add, _variance), {
        f"correction/{prefix}ratio_min": lowest(_lowest_of(r, scored)),
        f"correction/{prefix}ratio_mean": mean_of(total, count),
        f"correction/{prefix}ratio_max": highest(-_lowest_of(-r, scored)),
        f"correction/{prefix}effective_sample_size": effective_sample_size(total, squares, count),
    }


def _growth_metrics(ratio: LogRatio, k3_BT: Tensor) -> dict[str, Metric]:
    """Return k3 by half of the completion, by position and by completion length."""
    scored_BT = ratio.scored_BT.double()
    mask_BT = ratio.mask_BT
    length_B1 = mask_BT.sum(dim=-1, keepdim=True)
    is_late_BT = 2 * (mask_BT.cumsum(dim=-1) - 1) >= length_B1  # tokens the policy wrote; tool output has no half
    halves = [(each * half_BT).sum() for half_BT in (is_late_BT, ~is_late_BT) for each in (k3_BT, scored_BT)]
    metrics = {"mismatch/late_over_early": Metric(tuple(halves), add, _growth)}
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    by_position = (position_T, k3_BT.sum(dim=0), scored_BT.sum(dim=0))
    by_length = (length_B1.squeeze(-1), k3_BT.sum(dim=-1), scored_BT.sum(dim=-1))
    for axis, (where, k3, scored) in (("position", by_position), ("length", by_length)):
        for name, low, high in zip(BIN_NAMES, BIN_EDGES, (*BIN_EDGES[1:], math.inf), strict=True):
            inside = (where >= low) & (where < high)
            metrics[f"mismatch/k3_kl/{axis}_{name}"] = mean_of((k3 * inside).sum(), (scored * inside).sum())
    return metrics


def _sum_of(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum()


def _lowest_of(values: Tensor, where: Tensor) -> Tensor:
    """Return the minimum of the `values` inside the mask `where`; inf if there is none."""
    # the appended inf keeps an empty batch from being an empty reduction
    return F.pad(torch.where(where, values, torch.inf).flatten(), (0, 1), value=torch.inf).amin()


def _variance(squares: float, count: float) -> float:
    return quotient(squares, count) - 1


def _growth(late_k3: float, late: float, early_k3: float, early: float) -> float:
    return quotient(quotient(late_k3, late), quotient(early_k3, early))
