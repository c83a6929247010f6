"""Rejection: which tokens or whole sequences are too far from the policy to learn from at all.

Weighting (`importance.py`) repairs a sample, rejection refuses it; a dropped sequence is always visible as dropped.

With log r_t = log pi_trainer - log pi_rollout, two divergences are estimated per token from the sample itself:

    k2_t = (log r_t)^2 / 2             k3_t = r_t - 1 - log r_t        both >= 0, both 0 iff the sides agree

Ratio bounds apply to r = pi_trainer / pi_rollout. A rule accepts when minimum <= statistic <= maximum. A token that
was not scored is never evidence against itself or its sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from .log_ratio import LogRatio


_Token = Literal["token_ratio", "token_k2", "token_k3", "token_veto"]
_Sequence = Literal["sequence_ratio", "geometric_ratio", "sequence_mean_k2", "sequence_mean_k3"]
_Maximum = Literal["sequence_max_k2", "sequence_max_k3"]
Statistic = Literal[_Token, _Sequence, _Maximum]

# What a rule looks at, and over what it decides: each token for itself, a sum or mean over the sequence, or every
# token of the sequence (one outside drops all; the maximum of a k is the same question)
_RULES: dict[Statistic, tuple[str, str]] = {
    "token_ratio": ("log_ratio", "token"),
    "token_k2": ("k2", "token"),
    "token_k3": ("k3", "token"),
    "token_veto": ("log_ratio", "every"),
    "sequence_ratio": ("log_ratio", "sum"),
    "geometric_ratio": ("log_ratio", "mean"),
    "sequence_mean_k2": ("k2", "mean"),
    "sequence_mean_k3": ("k3", "mean"),
    "sequence_max_k2": ("k2", "every"),
    "sequence_max_k3": ("k3", "every"),
}

_QUANTITIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "log_ratio": lambda log_r: log_r,
    "k2": lambda log_r: 0.5 * log_r.square(),
    "k3": lambda log_r: torch.expm1(log_r) - log_r,
}


@dataclass(frozen=True)
class Rejection:
    """One rule: a statistic and the band in which it is accepted.

    Parameters:
        statistic (`str`):
            - `"token_ratio"`, `"token_k2"`, `"token_k3"`: drop the token.
            - `"token_veto"`: drop the sequence if any token's ratio is outside (catastrophic tokens; 1e-4 is usual).
            - `"sequence_ratio"` (product of r_t), `"geometric_ratio"` (its T-th root), `"sequence_mean_k2"`,
              `"sequence_mean_k3"`, `"sequence_max_k2"`, `"sequence_max_k3"`: drop the sequence.
        minimum, maximum (`float`, *optional*):
            Bounds of a ratio (around 1), or the upper bound of a k.
        centre (`str`, *optional*, defaults to `"one"`):
            For `"geometric_ratio"`: `"measured"` multiplies the band by exp(-KL) measured in the run. Since
            E[log r] = -KL(rollout || trainer), a band around 1 rejects typical sequences as soon as the KL of the
            rollout's precision is comparable to the band's width.
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
        if self.statistic not in _RULES:
            yield f"statistic must be one of {', '.join(_RULES)}"
            return
        if self.centre not in ("one", "measured"):
            yield "centre must be 'one' or 'measured'"
        if self.centre == "measured" and self.statistic != "geometric_ratio":
            yield "centre='measured' needs statistic='geometric_ratio', the only one whose expectation is exp(-KL)"
        yield from bound_problems(self.minimum, self.maximum, ratio=_RULES[self.statistic][0] == "log_ratio")
        if self.minimum is None and self.maximum is None:
            yield "it has no bound; set maximum (and, for a ratio, minimum)"
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
    has_evidence_B = ratio.has_evidence_B1.squeeze(-1)
    mean_B = _mean_over_sequence(ratio.values_BT.double(), ratio).squeeze(-1)
    candidates = torch.where(has_evidence_B, mean_B, torch.nan)
    # the appended NaN is ignored; it only keeps an empty batch from being an empty reduction
    median = torch.nanquantile(torch.nn.functional.pad(candidates, (0, 1), value=torch.nan), 0.5)
    return torch.nan_to_num(median, nan=0.0), has_evidence_B.sum()


def keep_by_rule(rule: Rejection, ratio: LogRatio, log_centre: torch.Tensor | float) -> torch.Tensor:
    """Tokens that `rule` accepts, bool [B, T]. `log_centre` is the band's, for rules with `centre="measured"`."""
    quantity, scope = _RULES[rule.statistic]
    quantity_BT = _QUANTITIES[quantity](ratio.values_BT.double())
    if scope == "token":
        keep = _inside(quantity_BT, rule)
    elif scope == "every":
        keep = _inside(quantity_BT, rule).all(dim=-1, keepdim=True)
    elif scope == "sum":
        keep = _inside(quantity_BT.sum(dim=-1, keepdim=True), rule)
    else:
        mean_B1 = _mean_over_sequence(quantity_BT, ratio)
        keep = _inside(mean_B1 - log_centre if rule.centre == "measured" else mean_B1, rule)
    return (keep | ~ratio.has_evidence_B1) & ratio.mask_BT


def _mean_over_sequence(quantity_BT: torch.Tensor, ratio: LogRatio) -> torch.Tensor:
    return quantity_BT.sum(dim=-1, keepdim=True) / ratio.scored_per_sequence_B1.clamp(min=1)


def _inside(quantity: torch.Tensor, rule: Rejection) -> torch.Tensor:
    as_log = _RULES[rule.statistic][0] == "log_ratio"
    inside = torch.ones_like(quantity, dtype=torch.bool)
    if rule.minimum:  # a ratio is never below 0
        inside &= quantity >= (math.log(rule.minimum) if as_log else rule.minimum)
    if rule.maximum is not None:
        inside &= quantity <= (math.log(rule.maximum) if as_log else rule.maximum)
    return inside
