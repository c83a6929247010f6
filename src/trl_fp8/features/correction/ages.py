"""Metrics of tokens by age. The age of a token is how many syncs ago the engine got the weights that sampled it.

Each sync gives the engine a new version of the weights. The log-ratio of a token that version v sampled has two parts,

    log pi_now - log pi_rollout = (log pi_now - log pi_v)  +  (log pi_v - log pi_rollout)
                                        staleness                    mismatch

where pi_v is the policy from which version v was made. The trainer keeps no weights of earlier versions, so it cannot
compute pi_v of older tokens. A *fresh* token, of age 0, has no staleness, because its pi_v is the policy now. So if
tokens have ages, `mismatch/*` is measured only on fresh tokens, except the fractions in `OF_ALL_AGES`.

Let log r be the left side of the equation. Over the tokens of one version

    mean(-log r) = KL(rollout || pi_v) + E[log pi_v - log pi_now]

If FP8 causes the same mismatch in each version, the difference between mean(-log r) of older tokens and of fresh
tokens is the second term, an estimate of KL(pi_v || pi_now).

    staleness/k1_kl/age_A, k3_kl/age_A     as in measures.py, of tokens of age A: staleness and mismatch together
    staleness/k1_beyond_mismatch           mean of -log r of older tokens, minus the mean of -log r of the fresh tokens
                                           of the latest batch that had fresh tokens
    staleness/fraction_stale, age_mean, age_max
"""

from dataclasses import replace
from operator import add

import torch
from torch import Tensor

from trl_fp8.run.batch import LogRatio, Metric, highest, mean_of, quotient


# Measured on tokens of any age, because a missing log-prob is a fault at any age
OF_ALL_AGES = ("mismatch/fraction_missing", "mismatch/fraction_broken", "mismatch/fraction_clamped")
BEYOND_MISMATCH = "staleness/k1_beyond_mismatch"
# Name of a bin -> (low, high): ages with low <= age < high
AGES = {"0": (0, 1), "1": (1, 2), "2": (2, 3), "3-4": (3, 5), "5-8": (5, 9), "9+": (9, torch.inf)}


def of_age_0(ratio: LogRatio, ages_BT: Tensor) -> LogRatio:
    """Return the log-ratios of the fresh tokens. All masks are False at other tokens."""
    fresh_BT = ages_BT == 0
    return replace(
        ratio,
        values_BT=torch.where(fresh_BT, ratio.values_BT, 0.0),
        mask_BT=ratio.mask_BT & fresh_BT,
        scored_BT=ratio.scored_BT & fresh_BT,
        missing_BT=ratio.missing_BT & fresh_BT,
        broken_BT=ratio.broken_BT & fresh_BT,
        clamped_BT=ratio.clamped_BT & fresh_BT,
    )


def age_metrics(ratio: LogRatio, ages_BT: Tensor) -> dict[str, Metric]:
    """Return `staleness/*` of one batch on one rank. `ages_BT` is int64. A mean over no tokens is NaN."""
    log_r_BT = ratio.values_BT.double()
    k3_BT = torch.expm1(log_r_BT) - log_r_BT
    stale_BT = ratio.scored_BT & (ages_BT > 0)
    fresh_BT = ratio.scored_BT & (ages_BT == 0)
    tokens = ratio.mask_BT.sum()
    # Sum of -log r over the tokens, and their number
    stale_parts = -(log_r_BT * stale_BT).sum(), stale_BT.sum()
    fresh_parts = -(log_r_BT * fresh_BT).sum(), fresh_BT.sum()
    metrics = {
        BEYOND_MISMATCH: Metric((*stale_parts, *fresh_parts), add, _beyond),
        "staleness/fraction_stale": mean_of((ratio.mask_BT & (ages_BT > 0)).sum(), tokens),
        "staleness/age_mean": mean_of((ages_BT * ratio.mask_BT).sum(), tokens),
        "staleness/age_max": highest((ages_BT * ratio.mask_BT).flatten().max()),
    }
    for name, (low, high) in AGES.items():
        where_BT = ratio.scored_BT & (ages_BT >= low) & (ages_BT < high)
        count = where_BT.sum()
        metrics[f"staleness/k1_kl/age_{name}"] = mean_of(-(log_r_BT * where_BT).sum(), count)
        metrics[f"staleness/k3_kl/age_{name}"] = mean_of((k3_BT * where_BT).sum(), count)
    return metrics


def with_latest_mismatch(metric: Metric, latest: tuple[float, float]) -> tuple[Metric, tuple[float, float]]:
    """Return `staleness/k1_beyond_mismatch` also for a batch without fresh tokens, and the next value of `latest`.

    `metric` comes from `age_metrics`. `latest` is the sum of -log r over the fresh tokens of the latest batch that had
    fresh tokens, and the number of these tokens. A batch without fresh tokens takes both from `latest`.
    """
    stale, stale_tokens, fresh, fresh_tokens = metric.parts
    if fresh_tokens:
        latest = fresh, fresh_tokens
    return replace(metric, parts=(stale, stale_tokens, *latest)), latest


def _beyond(stale: float, stale_tokens: float, fresh: float, fresh_tokens: float) -> float:
    return quotient(stale, stale_tokens) - quotient(fresh, fresh_tokens)
