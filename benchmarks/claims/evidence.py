"""What a handful of numbers says: bootstrap intervals as wide as so few deserve, exact tests, and Holm's procedure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp

import numpy as np
from scipy.stats import binomtest, norm, t


RESAMPLES = 10_000
FEWEST = 5  # units that have an interval: no resample of fewer is as far from their mean as Student's t
LEVEL = 0.05  # of intervals: one in twenty does not hold what it is of


@dataclass(frozen=True)
class Estimate:
    """A mean or share of `n` units, and the ends of its interval: None of less than `FEWEST`."""

    value: float
    low: float | None
    high: float | None
    n: int

    def mapped(self, function: Callable[[float], float]) -> "Estimate":
        """On the scale of a rising `function`: `exp` makes ratios of differences of logarithms."""
        return Estimate(*(None if x is None else function(x) for x in (self.value, self.low, self.high)), self.n)


def mean(values: Iterable[float], level: float = LEVEL) -> Estimate | None:
    """Of values that are independent of each other; None of none."""
    return clustered_mean({index: [value] for index, value in enumerate(values)}, level)


def clustered_mean(groups: Mapping[object, Sequence[float]], level: float = LEVEL) -> Estimate | None:
    """Mean of all values, groups resampled as wholes: values of a group (a seed) are not independent. `n` groups."""
    n = len(groups)
    if n == 0:
        return None
    counts = np.array([len(group) for group in groups.values()])
    sums = np.array([sum(group) for group in groups.values()], dtype=float)
    value = float(sums.sum() / counts.sum())
    if n < FEWEST:
        return Estimate(value, None, None, n)
    drawn = _drawn(n)
    low, high = np.quantile(drawn @ sums / (drawn @ counts), _percentiles(n, level))
    return Estimate(value, float(low), float(high), n)


@cache
def _drawn(n: int) -> np.ndarray:
    """How often each of n units is in each resample, `[RESAMPLES, n]`: the same ones every time.

    `scipy.stats.bootstrap` would draw others, which would move the ends of published intervals by their third digit.
    """
    return np.random.default_rng(0).multinomial(n, [1 / n] * n, size=RESAMPLES)


def _percentiles(n: int, level: float) -> tuple[float, float]:
    """Those that give the interval of n normal values Student's width, where those at level / 2 are too narrow:
    a resample's variance lacks the factor n / (n - 1), and its quantiles are the normal distribution's.
    """
    low = float(norm.cdf((n / (n - 1)) ** 0.5 * t.ppf(level / 2, n - 1)))
    return low, 1 - low


def sign_flip(differences: Sequence[float]) -> float:
    """Exact two-sided p of paired differences: how many of all choices of their signs have a mean as far from zero.

    All 2^n choices are one product here. `scipy.stats.permutation_test` makes them one by one, seconds for n = 16.
    """
    n = len(differences)
    signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)  # [2^n, n]
    means = signs @ np.abs(differences)
    least = abs(sum(differences)) * (1 - 1e-9)  # of the same sum in another order, too
    return float((np.abs(means) >= least).mean())


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p of each: those up to a level are rejected at that level for the whole family."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted


def share(count: int, n: int, level: float = LEVEL) -> Estimate:
    """`count` of n, with the exact interval of Clopper and Pearson."""
    found = binomtest(count, n).proportion_ci(1 - level, method="exact")
    return Estimate(count / n, float(found.low), float(found.high), n)


def geometric_mean(logarithms: Iterable[float]) -> Estimate | None:
    """Of the numbers that have these logarithms, the interval too."""
    found = mean(logarithms)
    return found and found.mapped(exp)
