"""Metrics of a batch: how far engine and trainer disagree about sampled tokens, and what a correction changed.

The mismatch is measured on raw ratios (before any bound) and on the mask before any rejection. If it were measured
afterwards, it would fall to zero exactly when the correction throws the evidence away. With log r as defined in
`run/batch.py`:

    k1_kl = mean(-log r)   k3_kl = mean(r - 1 - log r)      two estimates of KL(rollout || trainer), k3 never negative
    chi2_token = mean(r^2) - 1                              variance of the token ratio, if mean(r) = 1
    chi2_sequence = mean_i (prod_t r)^2 - 1                 the same for sequences, with log(prod_t r) clamped to +-20
    ppl_ratio = mean_i exp(-mean_t log r)                   trainer perplexity / rollout perplexity, per sequence
    token_mult_prob_error = mean(exp|log r|)                1 is perfect; NeMo-RL's alarm metric
    effective_sample_size = (sum r)^2 / (n sum r^2)         1 is perfect; 1/n if one of n tokens has all the weight

An error that accumulates in an FP8 KV cache grows along a completion. So k3_kl is also measured by position and by
completion length. `late_over_early` is k3_kl of the second halves of completions, divided by that of the first halves.

Ranks have different numbers of tokens, so a mean over their means would be wrong. An `.item()` for each metric would
synchronize with the device each time. So the parts of a metric (run/batch.py) are tensors on the device. `measured`
merges the parts of all metrics over ranks and reads them at once.
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


# Bins of positions and lengths, in tokens. The last bin is open. The bins are fixed, because all ranks and steps need
# the same metrics
BIN_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
BIN_NAMES = tuple(f"{a}-{b - 1}" for a, b in pairwise(BIN_EDGES)) + (f"{BIN_EDGES[-1]}+",)
# Metrics that `importance.correct` has already reduced over ranks
SAME_ON_ALL_RANKS = ("correction/batch_norm_factor", "correction/log_centre")


def measured(
    metrics: Mapping[str, Metric], gather: Callable[[Tensor], Tensor] = lambda values: values
) -> dict[str, Metric]:
    """Merge metrics over ranks. Their parts are 0-d tensors of this rank before, and numbers afterwards.

    `gather` concatenates or stacks a 1-D tensor over ranks. `gather` is called once, and the device is read once. Bins
    without a token are left out.
    """
    parts = []  # of all metrics, one after another
    for metric in metrics.values():
        parts += [part.double() for part in metric.parts]
    parts_of_ranks = gather(torch.stack(parts)).reshape(-1, len(parts))  # a row for each rank
    # Merge each part in all three ways on the device. On the host choose the way that its metric names
    sums, minima, maxima = torch.stack(
        [parts_of_ranks.sum(dim=0), parts_of_ranks.amin(dim=0), parts_of_ranks.amax(dim=0)]
    ).tolist()
    merged_parts = {add: sums, min: minima, max: maxima}
    result = {}
    start = 0  # index of the metric's first part
    for name, metric in metrics.items():
        end = start + len(metric.parts)
        values = tuple(merged_parts[metric.merge][start:end])
        start = end
        if ("/k3_kl/" in name or "/k1_kl/" in name) and not values[1]:  # a bin without a token
            continue
        result[name] = Metric(values, metric.merge, metric.formula)
        if name in SAME_ON_ALL_RANKS:
            result[name] = mean_of(result[name].value)  # a log shows the mean over batches, not the maximum
    if "correction/fraction_masked_tokens" in result:
        unused, tokens = result["correction/fraction_masked_tokens"].parts
        result["correction/all_rejected"] = mean_of(float(tokens > 0 and unused == tokens))
    return result


def mismatch_metrics(ratio: LogRatio) -> dict[str, Metric]:
    """Return `mismatch/*`, and `correction/*` of the raw ratios, of one batch on one rank. Empty means are NaN."""
    log_r_BT = ratio.values_BT.double()
    k3_BT = torch.expm1(log_r_BT) - log_r_BT
    distance_BT = log_r_BT.abs()
    log_r_B = log_r_BT.sum(dim=-1)
    scored_B = ratio.scored_BT.any(dim=-1)
    mean_log_r_B = log_r_B / ratio.scored_BT.sum(dim=-1).clamp(min=1)
    tokens = ratio.mask_BT.sum()
    scored = ratio.scored_BT.sum()
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
    keep_by: Mapping[str, Tensor],  # statistic of a rule -> tokens that the rule accepts
    counted_BT: Tensor,  # tokens that the loss averages over
) -> dict[str, Metric]:
    """Return the metrics of a correction of one batch on one rank.

    Fractions are of the tokens and sequences *before* rejection, so a correction that drops most of a batch shows a
    fraction near 1. A token is masked if it is not kept or its weight is 0.
    """
    used_BT = torch.where(keep_BT, weights_BT, 0.0).double()
    tokens = mask_BT.sum()
    sequences = mask_BT.any(dim=-1).sum()
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
    """Return chi2, and `correction/PREFIX...`, of the ratios of the tokens [B, T] or sequences [B] in `scored`."""
    r = log_r.exp()
    count = scored.sum()
    total = _sum_of(r, scored)
    squares = _sum_of(r.square(), scored)
    chi2 = Metric((squares, count), add, _variance)
    metrics = {
        f"correction/{prefix}ratio_min": lowest(_lowest_of(r, scored)),
        f"correction/{prefix}ratio_mean": mean_of(total, count),
        f"correction/{prefix}ratio_max": highest(-_lowest_of(-r, scored)),
        f"correction/{prefix}effective_sample_size": effective_sample_size(total, squares, count),
    }
    return chi2, metrics


def _growth_metrics(ratio: LogRatio, k3_BT: Tensor) -> dict[str, Metric]:
    """Return k3 by half of the completion, by position and by completion length."""
    scored_BT = ratio.scored_BT.double()
    mask_BT = ratio.mask_BT
    length_B1 = mask_BT.sum(dim=-1, keepdim=True)
    place_BT = mask_BT.cumsum(dim=-1) - 1  # index among the tokens that the policy wrote, without the output of tools
    is_late_BT = 2 * place_BT >= length_B1
    # Sum of k3 over the tokens of a half, and the number of scored tokens
    late = (k3_BT * is_late_BT).sum(), (scored_BT * is_late_BT).sum()
    early = (k3_BT * ~is_late_BT).sum(), (scored_BT * ~is_late_BT).sum()
    metrics = {"mismatch/late_over_early": Metric((*late, *early), add, _growth)}
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    length_B = length_B1.squeeze(-1)
    metrics |= _k3_by_bin("position", position_T, k3_BT.sum(dim=0), scored_BT.sum(dim=0))
    metrics |= _k3_by_bin("length", length_B, k3_BT.sum(dim=-1), scored_BT.sum(dim=-1))
    return metrics


def _k3_by_bin(axis: str, places: Tensor, k3: Tensor, scored: Tensor) -> dict[str, Metric]:
    """Return the mean k3 in each bin of `places`. `k3` and `scored` are sums over the tokens of each place."""
    metrics = {}
    upper_edges = (*BIN_EDGES[1:], math.inf)
    for name, low, high in zip(BIN_NAMES, BIN_EDGES, upper_edges, strict=True):
        inside = (places >= low) & (places < high)
        metrics[f"mismatch/k3_kl/{axis}_{name}"] = mean_of((k3 * inside).sum(), (scored * inside).sum())
    return metrics


def _sum_of(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum()


def _lowest_of(values: Tensor, where: Tensor) -> Tensor:
    """Return the minimum of the `values` inside the mask `where`; inf if there is none."""
    candidates = torch.where(where, values, torch.inf).flatten()
    # torch refuses the minimum of an empty tensor, so append an inf
    return F.pad(candidates, (0, 1), value=torch.inf).amin()


def _variance(squares: float, count: float) -> float:
    return quotient(squares, count) - 1


def _growth(late_k3: float, late: float, early_k3: float, early: float) -> float:
    return quotient(quotient(late_k3, late), quotient(early_k3, early))
