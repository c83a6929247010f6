"""Rejection: which tokens or whole sequences are too far from the policy to learn from at all.

Weighting (`importance.py`) repairs a sample, rejection refuses it; a dropped sequence is always visible as dropped.

With log r_t = log pi_trainer - log pi_rollout, two divergences are estimated per token from the sample itself:

    k2_t = (log r_t)^2 / 2             k3_t = r_t - 1 - log r_t        both >= 0, both 0 iff the sides agree

Ratio bounds apply to r = pi_trainer / pi_rollout. A rule accepts when minimum <= statistic <= maximum. A token that
was not scored is never evidence against itself or its sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from trl_fp8.run.log_ratio import LogRatio


# What a rule decides over: each token for itself, every token of a sequence (one outside drops all; the maximum of a k
# is the same question), the sum or the mean over a sequence. The end of its name says of what: k2, k3, or log r.
_Each = Literal["token_ratio", "token_k2", "token_k3"]
_Every = Literal["token_veto", "sequence_max_k2", "sequence_max_k3"]
_Sum = Literal["sequence_ratio"]
_Mean = Literal["geometric_ratio", "sequence_mean_k2", "sequence_mean_k3"]
Statistic = Literal[_Each, _Every, _Sum, _Mean]


@dataclass(frozen=True)
class Rejection:
    """One rule: a statistic and the band in which it is accepted.

    Args:
        statistic: What is looked at, and what is dropped:

            - `"token_ratio"`, `"token_k2"`, `"token_k3"`: drop the token.
            - `"token_veto"`: drop the sequence if any token's ratio is outside (catastrophic tokens; 1e-4 is usual).
            - `"sequence_ratio"` (product of r_t), `"geometric_ratio"` (its T-th root), `"sequence_mean_k2"`,
              `"sequence_mean_k3"`, `"sequence_max_k2"`, `"sequence_max_k3"`: drop the sequence.
        minimum: Lower bound of a ratio, at most 1.
        maximum: Upper bound of a ratio, at least 1, or of a k.
        centre: For `"geometric_ratio"`: `"measured"` multiplies the band by exp(-KL) measured in the run. E[log r] is
            -KL, so a band around 1 rejects typical sequences once the KL of FP8 is comparable to the band's width.
    """

    statistic: Statistic
    minimum: float | None = None
    maximum: float | None = None
    centre: Literal["one", "measured"] = "one"

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ValueError(f"{self!r} is not a rejection rule: " + "; ".join(problems) + ".")

    def _problems(self) -> Iterator[str]:
        if self.statistic not in get_args(Statistic):
            yield f"statistic must be one of {', '.join(get_args(Statistic))}"
            return
        if self.centre not in ("one", "measured"):
            yield "centre must be 'one' or 'measured'"
        if self.centre == "measured" and self.statistic != "geometric_ratio":
            yield "centre='measured' needs statistic='geometric_ratio', the only one whose expectation is exp(-KL)"
        yield from bound_problems(self.minimum, self.maximum, ratio=self.is_ratio)
        if self.minimum is None and self.maximum is None:
            yield "it has no bound; set maximum (and, for a ratio, minimum)"
        if self.statistic == "token_veto" and self.minimum is None:
            yield "a veto needs minimum, the ratio below which a token is catastrophic (1e-4 is usual)"

    @property
    def is_ratio(self) -> bool:
        """Of r, with a band around 1; else of a divergence, with an upper bound."""
        return not self.statistic.endswith(("k2", "k3"))

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
    minimum: float | None, maximum: float | None, ratio: bool, names: tuple[str, str] = ("minimum", "maximum")
) -> Iterator[str]:
    """Yield what is wrong with the band [minimum, maximum] of a ratio (which must contain 1) or of a k (>= 0)."""
    low, high = f"{names[0]}={minimum!r}", f"{names[1]}={maximum!r}"
    if wrong := [text for text, value in ((low, minimum), (high, maximum)) if not _is_bound(value)]:
        yield f"{' and '.join(wrong)} must be a finite number, or None for no bound"
    elif not ratio:
        if minimum is not None:
            yield f"{low} has no meaning for a divergence, which is 0 when both sides agree; leave it None"
        if maximum is not None and maximum <= 0:
            yield f"{high} must be positive, or tokens on which both sides agree would be rejected"
    else:
        if minimum is not None and not 0 <= minimum <= 1:
            yield f"{low} must lie in [0, 1], so that a ratio of 1 (no mismatch) is inside"
        if maximum is not None and maximum < 1:
            yield f"{high} must be at least 1, so that a ratio of 1 (no mismatch) is inside"
        if minimum is not None and minimum == maximum:
            yield f"{low} equals {high}, which accepts nothing but exact agreement"


def _is_bound(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and math.isfinite(value))


def typical_log_ratio(ratio: LogRatio) -> tuple[torch.Tensor, torch.Tensor]:
    """Median over sequences of the mean log-ratio, an estimate of -KL, and the number of sequences behind it."""
    # a mean would let one broken sequence (log r = -20 throughout) move the centre of the band away from all others
    mean_B1 = ratio.mean_over_sequence_B1(ratio.values_BT.double())
    candidates_B = torch.where(ratio.has_evidence_B1, mean_B1, torch.nan).flatten()
    # the appended NaN is ignored; it only keeps an empty batch from being an empty reduction
    median = torch.nanquantile(torch.nn.functional.pad(candidates_B, (0, 1), value=torch.nan), 0.5)
    return torch.nan_to_num(median, nan=0.0), ratio.has_evidence_B1.sum()


def keep_by_rule(rule: Rejection, ratio: LogRatio, log_centre: torch.Tensor | float) -> torch.Tensor:
    """Tokens that `rule` accepts, bool [B, T]. `log_centre` is the band's, for rules with `centre="measured"`."""
    values = ratio.values_BT.double()
    if rule.statistic.endswith("k2"):
        values = 0.5 * values.square()
    elif rule.statistic.endswith("k3"):
        values = torch.expm1(values) - values
    if rule.statistic in get_args(_Sum):
        values = values.sum(dim=-1, keepdim=True)
    elif rule.statistic in get_args(_Mean):
        values = ratio.mean_over_sequence_B1(values)
    if rule.centre == "measured":
        values = values - log_centre
    bound = math.log if rule.is_ratio else float
    keep = torch.ones_like(values, dtype=torch.bool)
    if rule.minimum:  # a ratio is never below 0
        keep &= values >= bound(rule.minimum)
    if rule.maximum is not None:
        keep &= values <= bound(rule.maximum)
    if rule.statistic in get_args(_Every):
        keep = keep.all(dim=-1, keepdim=True)
    return (keep | ~ratio.has_evidence_B1) & ratio.mask_BT
