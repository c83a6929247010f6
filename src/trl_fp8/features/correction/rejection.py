"""Rejection: which tokens or whole sequences are too far from the policy to learn from at all.

Weighting (`importance.py`) repairs a sample, rejection drops it. `correction/fraction_rejected/*` has the share of
tokens that each rule drops.

A rule accepts if minimum <= statistic <= maximum. The statistic is computed from r = pi_trainer / pi_rollout of the
scored tokens (run/batch.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from trl_fp8.run.batch import LogRatio


Statistic = Literal["token_ratio", "token_veto", "sequence_ratio", "geometric_ratio"]


@dataclass(frozen=True)
class Rejection:
    """One rule: a statistic, and the band in which it accepts.

    Args:
        statistic: The ratio that must be inside the band, and what is dropped if it is outside:

            - `"token_ratio"`: r_t of a token; drops the token.
            - `"token_veto"`: r_t of any token, usually with a minimum of 1e-4; drops the sequence.
            - `"sequence_ratio"`: the product of r_t; drops the sequence.
            - `"geometric_ratio"`: the T-th root of this product; drops the sequence.
        minimum: Lower bound of the ratio, at most 1. None: no bound.
        maximum: Upper bound of the ratio, at least 1. None: no bound.
        centre: `"measured"` multiplies the band of a `"geometric_ratio"` by exp(-KL), which is measured on each batch.
            The mean of log r is -KL. So if the KL of FP8 rollouts is comparable to the band's width, a band around 1
            rejects typical sequences.
    """

    statistic: Statistic
    minimum: float | None = None
    maximum: float | None = None
    centre: Literal["one", "measured"] = "one"

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError(f"{self!r} is not a rejection rule: " + "; ".join(problems) + ".")

    def _problems(self) -> Iterator[str]:
        if self.statistic not in get_args(Statistic):
            yield f"statistic must be one of {', '.join(get_args(Statistic))}"
            return
        if self.centre not in ("one", "measured"):
            yield "centre must be 'one' or 'measured'"
        if self.centre == "measured" and self.statistic != "geometric_ratio":
            yield "centre='measured' needs statistic='geometric_ratio', the only one whose expectation is exp(-KL)"
        yield from bound_problems(self.minimum, self.maximum)
        if self.minimum is None and self.maximum is None:
            yield "it has no bound; set minimum and maximum"
        if self.statistic == "token_veto" and self.minimum is None:
            yield "a veto needs minimum, the ratio below which a token is catastrophic (1e-4 is usual)"

    @classmethod
    def parse(cls, text: str) -> Rejection:
        """Read `"statistic:minimum:maximum[:centre]"`, e.g. `"geometric_ratio:0.98:1.02:measured"`."""
        statistic, *rest = (part.strip() for part in text.split(":"))
        if len(rest) not in (2, 3):
            raise ValueError(
                f"{text!r} is not a rejection rule: expected 'statistic:minimum:maximum' with an optional ':centre', "
                "where a bound may be left empty, e.g. 'token_veto:1e-4:'."
            )
        try:
            bounds = [float(part) if part else None for part in rest[:2]]
        except ValueError:
            raise ValueError(f"{text!r} is not a rejection rule: its bounds must be numbers or empty.") from None
        return cls(statistic, *bounds, *rest[2:])


def bound_problems(
    minimum: float | None, maximum: float | None, names: tuple[str, str] = ("minimum", "maximum")
) -> Iterator[str]:
    """Yield each problem of the band [minimum, maximum] of a ratio, which must contain 1."""
    low, high = f"{names[0]}={minimum!r}", f"{names[1]}={maximum!r}"
    wrong = []
    for text, value in ((low, minimum), (high, maximum)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value)):
            wrong.append(text)
    if wrong:
        yield f"{' and '.join(wrong)} must be a finite number, or None for no bound"
        return
    if minimum is not None and not 0 <= minimum <= 1:
        yield f"{low} must lie in [0, 1], so that a ratio of 1 (no mismatch) is inside"
    if maximum is not None and maximum < 1:
        yield f"{high} must be at least 1, so that a ratio of 1 (no mismatch) is inside"
    if minimum is not None and minimum == maximum:
        yield f"{low} equals {high}, which accepts nothing but exact agreement"


def typical_log_ratio(ratio: LogRatio) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the median of the sequences' mean log-ratios, which estimates -KL, and the number of these sequences."""
    # Not the mean: a single broken sequence (log r = -20 throughout) moves the mean away from all other sequences
    mean_B1 = ratio.mean_over_sequence_B1(ratio.values_BT.double())
    candidates_B = torch.where(ratio.has_evidence_B1, mean_B1, torch.nan).flatten()
    # `nanquantile` ignores NaN, but raises for an empty tensor, so append a NaN
    candidates = torch.nn.functional.pad(candidates_B, (0, 1), value=torch.nan)
    median = torch.nanquantile(candidates, 0.5)
    return torch.nan_to_num(median, nan=0.0), ratio.has_evidence_B1.sum()


def keep_by_rule(rule: Rejection, ratio: LogRatio, log_centre: torch.Tensor | float) -> torch.Tensor:
    """Return the mask [B, T] of tokens that `rule` accepts. `log_centre` shifts a band with `centre="measured"`."""
    # The log of the rule's statistic: [B, T] for a token's ratio, [B, 1] for a sequence's
    log_r = ratio.values_BT.double()
    if rule.statistic == "sequence_ratio":
        log_r = log_r.sum(dim=-1, keepdim=True)
    elif rule.statistic == "geometric_ratio":
        log_r = ratio.mean_over_sequence_B1(log_r)
    if rule.centre == "measured":
        log_r = log_r - log_centre
    keep = torch.ones_like(log_r, dtype=torch.bool)
    if rule.minimum:  # a minimum of 0 bounds nothing, because ratios are positive
        keep &= log_r >= math.log(rule.minimum)
    if rule.maximum is not None:
        keep &= log_r <= math.log(rule.maximum)
    if rule.statistic == "token_veto":
        keep = keep.all(dim=-1, keepdim=True)
    # A sequence without any scored token is kept
    return (keep | ~ratio.has_evidence_B1) & ratio.mask_BT
