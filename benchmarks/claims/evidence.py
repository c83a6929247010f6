"""What a handful of numbers says: bootstrap intervals as wide as so few deserve, exact tests, and Holm's procedure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, exp
from statistics import NormalDist

import numpy as np

from ..record import T_95


RESAMPLES = 10_000
FEWEST = 5  # units that have an interval: no resample of fewer is as far from their mean as Student's t
LEVEL = 0.05  # of intervals: one in twenty does not hold what it is of
# Two-sided quantiles of Student's t for the mean of n runs
T = {LEVEL: T_95}
T[LEVEL / 2] = {5: 3.495, 6: 3.163, 7: 2.969, 8: 2.841, 9: 2.752, 10: 2.685}
T[LEVEL / 2] |= {11: 2.634, 12: 2.593, 13: 2.560, 14: 2.533, 15: 2.510, 16: 2.490}


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
    """How often each of n units is in each resample, `[RESAMPLES, n]`: the same ones every time."""
    return np.random.default_rng(0).multinomial(n, [1 / n] * n, size=RESAMPLES)


def _percentiles(n: int, level: float) -> tuple[float, float]:
    """Those that give the interval of n normal values Student's width, where those at level / 2 are too narrow:
    a resample's variance lacks the factor n / (n - 1), and its quantiles are the normal distribution's.
    """
    low = NormalDist().cdf(-((n / (n - 1)) ** 0.5) * T[level][n])
    return low, 1 - low


def sign_flip(differences: Sequence[float]) -> float:
    """Exact two-sided p of paired differences: how many of all choices of their signs have a mean as far from zero."""
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

    def above(p: float, least: int) -> float:
        return sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(least, n + 1))

    tail = level / 2
    low = _root(lambda p: above(p, count) - tail) if count else 0.0
    high = _root(lambda p: above(p, count + 1) - 1 + tail) if count < n else 1.0
    return Estimate(count / n, low, high, n)


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def geometric_mean(logarithms: Iterable[float]) -> Estimate | None:
    """Of the numbers that have these logarithms, the interval too."""
    found = mean(logarithms)
    return found and found.mapped(exp)
