"""Rollout correction: weights and a keep-mask that make rollouts of the engine usable as samples of the trainer.

The engine samples from pi_rollout, but the loss assumes pi_trainer. Multiplying each term of the loss by r =
pi_trainer / pi_rollout removes this bias and adds variance, which grows with the number of ratios in a product.
Bounding r lowers the variance and brings back some bias. Three decisions are separate, because mixing them would hide
what was dropped:

    weighting     each ratio becomes a bounded weight (`level` and `bound`)
    rejection     rules on the unbounded ratios drop tokens and sequences (`rejection.py`)
    denominator   rejected tokens count in the loss average, or do not

Levels `"token"` and `"sequence"` equal TRL's four `vllm_importance_sampling_mode`s bit for bit, if no log-ratio
reaches +-20. Larger ones may overflow in TRL; this module clamps them. Weights in special cases:

    padding, tool output               exactly 1, because VESPO sums log(weight) over all T columns
    unit with a log-ratio of 0         exactly 1, unless `batch_normalize` divides the weight
    token without a rollout log-prob   1 at level "token"; at other levels the weight of the token's sequence, to whose
                                       ratio the token does not contribute

`correct` does all three. No value is read on the host, and no result carries gradient.

Shapes: B sequences, T completion tokens. A *unit* is a token or a sequence, whichever has a ratio of its own at the
correction's level. Tensors of units are [B, T] or [B, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trl_fp8.run.batch import LOG_RATIO_BOUND, LogRatio, Metric, highest, mean_of

from .measures import correction_metrics
from .rejection import Rejection, bound_problems, keep_by_rule, typical_log_ratio


@dataclass(frozen=True)
class RolloutCorrection:
    """Settings of a correction. The default is token truncation at 2, the common choice for FP8 rollouts.

    Args:
        level: The ratio that is bounded: r_t of a `"token"`, prod_t r_t of a `"sequence"`, or the `"geometric"` mean
            (prod_t r_t)^(1/T) of a sequence. None leaves all weights at 1, for example to reject without weighting.
        bound: What happens to a ratio outside [`bound_min`, `bound_max`]: `"truncate"` clamps it, `"mask"` sets the
            weight to 0 (IcePop when both bounds are set). A masked token stays in the denominator.
        bound_min: Lower bound of r = pi_trainer / pi_rollout, at most 1. None is no bound.
        bound_max: Upper bound, at least 1. None is no bound.
        reject: Rejection rules; a token is trained on if all accept it.
        batch_normalize: Divide the bounded weights by their mean over the batch on all ranks, before rejection, so
            that the correction does not change the learning rate.
        denominator: `"keep"`: rejected tokens contribute 0 and still count in the loss average. `"shrink"`: they do
            not count.
        bypass: Use the rollout's log-probs as old log-probs, so that the ratio in the loss itself corrects the
            mismatch. Needs `level=None`.
        monitor_only: Measure what the correction would have done, and change nothing.

    Raises:
        ValueError: The settings contradict each other; the message lists how.
    """

    level: Literal["token", "sequence", "geometric"] | None = "token"
    bound: Literal["truncate", "mask"] = "truncate"
    bound_min: float | None = None
    bound_max: float | None = 2.0
    reject: tuple[Rejection, ...] = ()
    batch_normalize: bool = False
    denominator: Literal["keep", "shrink"] = "keep"
    bypass: bool = False
    monitor_only: bool = False

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError(f"{self!r} cannot be applied:\n" + "\n".join(f"- {problem}." for problem in problems))

    def _problems(self) -> Iterator[str]:
        if self.level not in ("token", "sequence", "geometric", None):
            yield f"level={self.level!r} is unknown; use one of token, sequence, geometric, or None for weights of 1"
        if self.bound not in ("truncate", "mask"):
            yield f"bound={self.bound!r} is unknown; use one of truncate, mask"
        if self.denominator not in ("keep", "shrink"):
            yield f"denominator={self.denominator!r} is unknown; use one of keep, shrink"
        yield from bound_problems(self.bound_min, self.bound_max, names=("bound_min", "bound_max"))
        if self.level is not None and self.bound == "truncate" and self.bound_min is None and self.bound_max is None:
            yield "bound='truncate' has nothing to truncate at; set bound_max (2.0 is usual)"
        if not isinstance(self.reject, tuple) or not all(isinstance(rule, Rejection) for rule in self.reject):
            yield f"reject={self.reject!r} must be a tuple of Rejection rules"
        elif len({rule.statistic for rule in self.reject}) < len(self.reject):
            yield "reject names a statistic twice; give each statistic one band"
        if self.batch_normalize and self.level is None:
            yield "batch_normalize=True has no weights to normalize with level=None; set a level or drop it"
        if self.bypass and self.level is not None:
            yield "bypass=True already corrects through the policy ratio; set level=None, or the ratio enters twice"
        if self.bypass and self.monitor_only:
            yield "bypass=True changes the old log-probs and monitor_only=True promises to change nothing; choose one"

    @classmethod
    def from_trl_mode(cls, mode: str, clip_min: float | None, clip_max: float | None) -> RolloutCorrection:
        """Return the correction that TRL's `vllm_importance_sampling_mode`, `_clip_min` and `_clip_max` select."""
        level, _, bound = mode.partition("_")
        return cls(level=level, bound=bound, bound_min=clip_min, bound_max=clip_max)

    @property
    def fits_vespo(self) -> bool:
        """Return whether VESPO can use the weights. VESPO takes sum_t log(weight_t) as a sequence's log-ratio.

        At level "geometric" T equal terms add up to the log-ratio. At level "sequence" each of the T terms is already
        the log-ratio, so the sum would be T times too large.
        """
        return self.level != "sequence"

    @property
    def needs_all_reduce(self) -> bool:
        """Return whether weights or mask depend on other ranks' tokens."""
        return self.batch_normalize or self.measures_centre

    @property
    def measures_centre(self) -> bool:
        """Return whether the centre of a rejection band is measured on each batch."""
        return any(rule.centre == "measured" for rule in self.reject)


@dataclass(frozen=True)
class CorrectedRollout:
    """Result of a correction. No tensor carries gradient. Weights are finite, whatever values the log-probs have."""

    weights: Tensor  # [B, T] weights from level and bound, before rejection; 1 at padding
    keep_mask: Tensor  # [B, T] bool: the tokens that are trained on; False at padding and at rejected tokens
    loss_weights: Tensor  # TRL's `importance_sampling_ratio`: [B, T], or [B, 1] as in TRL's sequence modes
    loss_mask: Tensor  # [B, T] bool: the tokens that count in the loss and in its denominator
    old_logps: Tensor | None  # [B, T] replaces TRL's `old_per_token_logps`; None without `bypass`
    metrics: dict[str, Metric]  # `correction/*` of this rank; `measures.measured` merges them


def correct(
    ratio: LogRatio, correction: RolloutCorrection, all_reduce: Callable[[Tensor], Tensor] | None = None
) -> CorrectedRollout:
    """Apply `correction` to the log-ratios of a batch. Return weights, masks and metrics.

    `all_reduce` returns the sum of a 1-D tensor over ranks; None: there is one rank. All ranks call `all_reduce`
    together: once if `correction.needs_all_reduce`, else never.
    """
    # Weights: bound the ratio of each unit, and divide by the mean weight if the correction says so
    raw, is_unit = _raw_ratio(ratio, correction.level)
    low = -math.inf if correction.bound_min is None else correction.bound_min
    high = math.inf if correction.bound_max is None else correction.bound_max
    too_high = raw > high
    too_low = raw < low
    if correction.bound == "mask":
        bounded = raw.masked_fill(too_high | too_low, 0.0)
    else:
        bounded = raw.clamp(low, high)
    mean_weight, log_centre = _batch_statistics(bounded, is_unit, ratio, correction, all_reduce)
    bounded = torch.where(is_unit, bounded / mean_weight.to(bounded.dtype), 1.0)
    weights_BT = torch.where(ratio.mask_BT, bounded, 1.0)

    # Rejection: a token is kept if all rules accept it
    keep_by = {rule.statistic: keep_by_rule(rule, ratio, log_centre) for rule in correction.reject}
    keep_BT = torch.stack([ratio.mask_BT, *keep_by.values()]).all(dim=0)

    # Denominator: whether rejected tokens count in the loss average
    loss_mask_BT = keep_BT if correction.denominator == "shrink" else ratio.mask_BT

    metrics = {
        "correction/fraction_clipped_high": mean_of((too_high & is_unit).sum(), is_unit.sum()),
        "correction/fraction_clipped_low": mean_of((too_low & is_unit).sum(), is_unit.sum()),
        "correction/batch_norm_factor": highest(mean_weight),  # the same on every rank, like log_centre
        **correction_metrics(
            mask_BT=ratio.mask_BT,
            weights_BT=weights_BT,
            keep_BT=keep_BT,
            keep_by=keep_by,
            counted_BT=loss_mask_BT,
        ),
    }
    if correction.reject:
        metrics["correction/log_centre"] = highest(log_centre)
    if correction.monitor_only:
        ones_BT = torch.ones_like(weights_BT)
        return CorrectedRollout(
            weights=ones_BT,
            keep_mask=ratio.mask_BT,
            loss_weights=ones_BT,
            loss_mask=ratio.mask_BT,
            old_logps=None,
            metrics=metrics,
        )
    # At level "sequence" TRL takes weights [B, 1] and broadcasts them over the tokens. With rejection the weights are
    # [B, T], because tokens of a sequence may have different weights
    loss_weights = bounded if correction.level == "sequence" else weights_BT
    if correction.reject:
        # A rejected token that counts in the denominator gets weight 0. Other rejected tokens are dropped by the loss
        # mask, and get weight 1, because VESPO multiplies the weights of all T columns
        rejected_weight = 0.0 if correction.denominator == "keep" else 1.0
        loss_weights = weights_BT.masked_fill(ratio.mask_BT & ~keep_BT, rejected_weight)
    old_logps_BT = None
    if correction.bypass:
        # Take the rollout's log-probs, and the trainer's where the rollout's are missing. No log-prob may be more than
        # 20 below the trainer's, because the ratio in the loss may overflow
        old_logps_BT = torch.where(ratio.mask_BT & ~ratio.missing_BT, ratio.rollout_BT, ratio.trainer_BT)
        too_far_below = ratio.clamped_BT & (ratio.values_BT > 0)
        old_logps_BT = torch.where(too_far_below, ratio.trainer_BT - LOG_RATIO_BOUND, old_logps_BT)
    return CorrectedRollout(
        weights=weights_BT,
        keep_mask=keep_BT,
        loss_weights=loss_weights,
        loss_mask=loss_mask_BT,
        old_logps=old_logps_BT,
        metrics=metrics,
    )


def _raw_ratio(ratio: LogRatio, level: str | None) -> tuple[Tensor, Tensor]:
    """Return the ratio of each unit, and a mask of the units that have a scored token (run/batch.py)."""
    if level is None:  # each token is a unit with a ratio of 1
        return torch.ones_like(ratio.values_BT), ratio.scored_BT
    if level == "token":
        return torch.exp(ratio.values_BT), ratio.scored_BT
    if level == "geometric":
        log_r_B1 = ratio.mean_over_sequence_B1(ratio.values_BT)
    else:
        log_r_B1 = ratio.values_BT.sum(dim=-1, keepdim=True)
    return torch.exp(log_r_B1.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)), ratio.has_evidence_B1


def _batch_statistics(
    bounded: Tensor,
    is_unit: Tensor,
    ratio: LogRatio,
    correction: RolloutCorrection,
    all_reduce: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return the mean weight and the log of the bands' centre, over all ranks.

    The mean weight is 1 without `batch_normalize`, and the log of the centre is 0 if no rule measures the centre.
    """
    one = torch.ones((), dtype=torch.float64, device=bounded.device)
    zero = torch.zeros_like(one)
    if not correction.needs_all_reduce:
        return one, zero
    # Sums over all ranks, from which two means follow: of the log-centre over sequences, of the weight over units
    log_centre = zero
    sequences = zero
    if correction.measures_centre:
        log_centre, sequences = typical_log_ratio(ratio)
    weight_sum = torch.where(is_unit, bounded, 0.0).sum(dtype=torch.float64)
    local = torch.stack([log_centre * sequences, sequences.double(), weight_sum, is_unit.sum().double()])
    totals = all_reduce(local) if all_reduce is not None else local
    log_centre_total, sequence_total, weight_total, unit_total = totals
    mean_weight = weight_total / unit_total.clamp(min=1)
    # If (nearly) all weights are masked to 0, a division by their mean would only amplify noise
    is_usable = (mean_weight > 1e-8) & correction.batch_normalize
    mean_log_centre = log_centre_total / sequence_total.clamp(min=1)
    # The log of the centre estimates -KL, which is at most 0. So lower a positive estimate to 0
    return torch.where(is_usable, mean_weight, one), mean_log_centre.clamp(max=0.0)
