"""A metric of one batch, on the host and of all ranks, that can be merged with that of another batch.

A log covers several batches. The mean of their maxima is no maximum, and the mean of their ratios gives a batch of
few tokens as much say as one of many. So a metric keeps the numbers that it is computed from, its parts: two metrics
merge part by part, and the value is computed when it is logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add


@dataclass(frozen=True)
class Metric:
    """One metric of one or more batches."""

    parts: tuple[float, ...]
    merge: Callable[[float, float], float]  # of the same part of two batches
    formula: Callable[..., float]  # of the parts; NaN if nothing was measured

    def __or__(self, other: Metric) -> Metric:
        """The metric of both batches."""
        return Metric(tuple(map(self.merge, self.parts, other.parts)), self.merge, self.formula)

    @property
    def value(self) -> float:
        return self.formula(*self.parts)


def quotient(numerator: float, denominator: float) -> float:
    """NaN where the denominator is 0."""
    return numerator / denominator if denominator else math.nan


def mean_of(total: float, count: float = 1.0) -> Metric:
    """A mean, weighted by what `count` counts. NaN over nothing."""
    return Metric((total, count), add, quotient)


def highest(value: float) -> Metric:
    """A maximum; -inf is that of nothing, and reads as NaN."""
    return Metric((value,), max, _measured)


def lowest(value: float) -> Metric:
    """A minimum; inf is that of nothing, and reads as NaN."""
    return Metric((value,), min, _measured)


def effective_sample_size(total: float, squares: float, count: float) -> Metric:
    """(sum w)^2 / (n sum w^2) of n weights: 0 if all of them are 0, NaN if there is none."""
    return Metric((total, squares, count), add, _effective_share)


def values_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values by name."""
    return {name: metric.value for name, metric in metrics.items()}


def _measured(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _effective_share(total: float, squares: float, count: float) -> float:
    return total**2 / (count * squares) if squares else 0.0 if count else math.nan
