"""The records of one generation: rollouts, TRL's batch of tensors, its log-ratios, and metrics that merge.

TRL's `_generate_and_score_completions` returns a dictionary of tensors, which its loss reads. Features add keys of
their own. TRL shuffles and splits a batch by sequence, so each tensor of a feature has a row for each sequence.

Correction and mismatch are both computed from the log-ratios

    log r_t = log pi_trainer(t) - log pi_rollout(t)        r > 1: the trainer likes the token more than the engine did

A token is *scored* if both sides gave it a usable log-prob. An unscored token has log r = 0, so it gets no correction.
Averages leave it out, and metrics report how many there are. A correction bounds r itself; some papers
define the ratio the other way round.

Shape letters: B sequences, P prompt columns, T completion columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add

import torch


# TRL's keys, as of 1.16
PROMPT_IDS = "prompt_ids"  # [B, P], padded on the left
COMPLETION_IDS = "completion_ids"  # [B, T], padded on the right
COMPLETION_MASK = "completion_mask"  # [B, T]: 0 at padding
TOOL_MASK = "tool_mask"  # [B, T]: 0 at tokens that a tool wrote; TRL leaves it out where there are no tools
TRAINER_LOGPS = "old_per_token_logps"  # [B, T]: the trainer's; absent if TRL runs no old-log-prob pass
ROLLOUT_LOGPS = "sampling_per_token_logps"  # [B, T]: the engine's; absent without importance sampling correction
LOSS_WEIGHTS = "importance_sampling_ratio"  # [B, T] or [B, 1]: factors of the loss
LOSS_TOKENS = "num_items_in_batch"  # 0-d: tokens that the loss averages over, on all ranks

# This package's own key, [B, T] int64: number of syncs since the engine got the weights that sampled a token. Absent
# if the current policy sampled all tokens
VERSION_AGES = "version_ages"

# Two versions of a model do not differ by a factor of exp(20) = 4.9e8. The bound keeps sums of squares finite
# (exp(40) = 2.4e17)
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Metric:
    """A metric of one batch, which can be merged with the same metric of another batch.

    A log covers several batches. The mean of their maxima is no maximum, and the mean of their ratios gives a batch of
    few tokens the same weight as one of many. So a metric keeps the numbers that it is computed from, its parts: two
    metrics merge part by part, and the value is computed when it is logged. Parts of one rank may be 0-d tensors;
    `measured` (features/correction/measures.py) merges them over all ranks into numbers.
    """

    parts: tuple[float, ...]
    merge: Callable[[float, float], float]  # combines the same part of two batches into one
    formula: Callable[..., float]  # computes the value from the parts; NaN if nothing was measured

    def __or__(self, other: Metric) -> Metric:
        """Return the metric of both batches."""
        parts = map(self.merge, self.parts, other.parts)
        return Metric(tuple(parts), self.merge, self.formula)

    @property
    def value(self) -> float:
        return self.formula(*self.parts)


def quotient(numerator: float, denominator: float) -> float:
    """Return the quotient, NaN if the denominator is 0."""
    return numerator / denominator if denominator else math.nan


def mean_of(total: float, count: float = 1.0) -> Metric:
    """Return the mean `total / count`, NaN if `count` is 0. Merged means are weighted by `count`."""
    return Metric((total, count), add, quotient)


def highest(value: float) -> Metric:
    """Return a metric whose value is the largest of all batches. Pass -inf for a batch without a value."""
    return Metric((value,), max, _finite_or_nan)


def lowest(value: float) -> Metric:
    """Return a metric whose value is the smallest of all batches. Pass inf for a batch without a value."""
    return Metric((value,), min, _finite_or_nan)


def effective_sample_size(total: float, squares: float, count: float) -> Metric:
    """Return the effective sample size of n weights w as a share of n: (sum w)^2 / (n sum w^2).

    The result is 0 if all weights are 0, and NaN without any weight.
    """
    return Metric((total, squares, count), add, _effective_share)


def require_own_name(name: str, values: Sequence[object]) -> None:
    """Raise `ValueError` if a reward function has logged a number under `name`, among the trainer's `Metric`s."""
    if not all(isinstance(value, Metric) for value in values):
        raise ValueError(
            f"log_metric({name!r}, ...): a reward function logs a metric under this name, which this trainer uses. "
            "Give it another name."
        )


def values_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the values by name."""
    return {name: metric.value for name, metric in metrics.items()}


def _finite_or_nan(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _effective_share(total: float, squares: float, count: float) -> float:
    if squares:
        return total**2 / (count * squares)
    return 0.0 if count else math.nan


@dataclass(frozen=True)
class LogRatio:
    """Per-token log-ratios of a batch, without gradient."""

    values_BT: torch.Tensor  # log r clamped to +-LOG_RATIO_BOUND, 0 where not scored; FP32, or FP64 with an FP64 input
    mask_BT: torch.Tensor  # bool: the tokens that are trained on, before any rejection
    scored_BT: torch.Tensor  # bool: trained on, and both log-probs are usable
    missing_BT: torch.Tensor  # bool: trained on, but the rollout log-prob is NaN or infinite
    broken_BT: torch.Tensor  # bool: the rollout log-prob is fine, but the trainer's is NaN or +inf
    clamped_BT: torch.Tensor  # bool: scored, and |log r| was beyond the bound
    trainer_BT: torch.Tensor  # unchanged log-probs of the trainer, in the dtype of `values_BT`
    rollout_BT: torch.Tensor  # unchanged log-probs of the engine, in the dtype of `values_BT`

    @property
    def has_evidence_B1(self) -> torch.Tensor:
        """Return for each sequence whether it has any scored token."""
        return self.scored_BT.any(dim=-1, keepdim=True)

    def mean_over_sequence_B1(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean over the scored tokens of each sequence, 0 without any. `values_BT` must be 0 elsewhere."""
        return values_BT.sum(dim=-1, keepdim=True) / self.scored_BT.sum(dim=-1, keepdim=True).clamp(min=1)


def log_ratio(trainer_logps_BT: torch.Tensor, rollout_logps_BT: torch.Tensor, mask_BT: torch.Tensor) -> LogRatio:
    """Compare the log-probs that trainer and engine gave to the same sampled tokens.

    Args:
        trainer_logps_BT: -inf gives a ratio near zero; NaN and +inf are failures of the forward and stay unscored.
        rollout_logps_BT: NaN and infinities count as missing: a sampled token cannot have probability zero.
        mask_BT: Nonzero at the tokens that are trained on. Elsewhere the log-probs may have any value.
    """
    shapes = [tuple(x.shape) for x in (trainer_logps_BT, rollout_logps_BT, mask_BT)]
    if len(shapes[0]) != 2 or len(set(shapes)) != 1:
        raise ValueError(
            f"trainer_logps, rollout_logps and mask have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}: a ratio "
            "needs one log-prob from each side for every token. Pass three tensors of the same shape [B, T]."
        )
    common_dtype = torch.promote_types(trainer_logps_BT.dtype, rollout_logps_BT.dtype)
    dtype = torch.promote_types(common_dtype, torch.float32)  # FP32 at least
    trainer = trainer_logps_BT.detach().to(dtype)
    rollout = rollout_logps_BT.detach().to(dtype)
    mask = mask_BT.bool()

    missing = mask & ~torch.isfinite(rollout)
    scored = mask & ~missing & (trainer < torch.inf)  # False for NaN and +inf, True for -inf
    difference = torch.where(scored, trainer - rollout, 0.0)
    values = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return LogRatio(
        values_BT=values,
        mask_BT=mask,
        scored_BT=scored,
        missing_BT=missing,
        broken_BT=mask & ~missing & ~scored,
        clamped_BT=difference != values,
        trainer_BT=trainer,
        rollout_BT=rollout,
    )


@dataclass
class Rollouts:
    """Token ids of one generation, a list for each rollout."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    age: int = 0  # number of syncs since the oldest rollout was requested
    metrics: dict[str, Metric] = field(default_factory=dict)  # measured by features; the trainer logs all of them

    @cached_property
    def sequences(self) -> list[list[int]]:
        """Return the token ids of each rollout, the prompt followed by the completion."""
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [list(prompt) + list(completion) for prompt, completion in pairs]


@dataclass
class Batch:
    """One generation batch on its way from TRL's scoring to its loss."""

    tensors: dict[str, torch.Tensor]  # TRL's dictionary, by the keys above
    metrics: dict[str, Metric] = field(default_factory=dict)  # measured by features; the trainer logs all of them
    record: dict = field(default_factory=dict)  # further entries of the batch's line in the run's log

    @property
    def mask_BT(self) -> torch.Tensor:
        """Return the mask of tokens that the policy wrote: the completion without padding and tool output."""
        return self.tensors[COMPLETION_MASK] * self.tensors.get(TOOL_MASK, 1)

    @cached_property
    def ratio(self) -> LogRatio | None:
        """Return log-ratios of the tokens that the policy wrote; None if trainer or engine computed no log-probs.

        The first access computes them. It has to come before a correction replaces the log-probs.
        """
        if not {TRAINER_LOGPS, ROLLOUT_LOGPS} <= self.tensors.keys():
            return None
        return log_ratio(self.tensors[TRAINER_LOGPS], self.tensors[ROLLOUT_LOGPS], self.mask_BT)
