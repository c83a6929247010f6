"""What training runs came to, read from their table."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite, log, nan
from pathlib import Path
from statistics import fmean

from . import run_table
from .grid import Cell


FALL = 0.2  # of a collapsed run, below its best
SMALLEST_K3 = 1e-12  # what is below, 0 too, is rounding of log-probs in FP32, and has this logarithm


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        accuracies: Held-out, by the number of generations behind them, 0 the first.
        curves: Of each generation that was logged, by name (`CURVES` in cell.py); None where there was no number.
        diverged: The error that weights which are not finite ended the run with, or None.
    """

    cell: Cell
    accuracies: dict[int, float]
    curves: dict[str, list[float | None]]
    diverged: str | None = None

    @classmethod
    def of(cls, row: dict) -> "Run":
        """A row of the table."""
        results = row["results"]
        accuracies = {int(generations): value for generations, value in results["held_out"].items()}
        return cls(run_table.cell_of(row), accuracies, results["curves"], results["end"]["diverged"])

    @cached_property
    def area(self) -> float:
        """Under the curve of held-out accuracy, per generation: a mean over the run."""
        curve = sorted(self.accuracies.items())
        trapezoids = [(x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(curve)]
        return sum(trapezoids) / (curve[-1][0] - curve[0][0])

    @property
    def final(self) -> float:
        return self.accuracies[max(self.accuracies)]

    @property
    def best(self) -> float:
        return max(self.accuracies.values())

    @property
    def collapsed(self) -> bool:
        return self.best - self.final > FALL - 1e-9

    @property
    def k3(self) -> float:
        return self.mean("k3")

    @property
    def log_k3(self) -> float:
        return log(max(self.k3, SMALLEST_K3)) if isfinite(self.k3) else nan

    def has_gaps(self, name: str) -> bool:
        """Whether a generation has no finite number, as where rollouts and policy have nothing in common any more."""
        return len(self._finite(name)) < len(self.curves.get(name, ()))

    def mean(self, name: str) -> float:
        """Over generations; NaN if none has a finite value."""
        return fmean(self._finite(name)) if self._finite(name) else nan

    def most(self, name: str) -> float:
        return max(self._finite(name), default=nan)

    def least(self, name: str) -> float:
        return min(self._finite(name), default=nan)

    def _finite(self, name: str) -> list[float]:
        return [value for value in self.curves.get(name, ()) if value is not None and isfinite(value)]


class Runs:
    """All of a grid that have run, by arm and seed."""

    def __init__(self, runs: list[Run]):
        self.by_arm: dict[str, dict[int, Run]] = {}
        for run in runs:
            self.by_arm.setdefault(run.cell.arm, {})[run.cell.seed] = run

    @classmethod
    def read(cls, table: Path | None = None) -> "Runs":
        """Of a table, by default that of this kind of host."""
        return cls(list(map(Run.of, run_table.read(table or run_table.path()))))

    def __iter__(self) -> Iterator[Run]:
        for seeds in self.by_arm.values():
            yield from seeds.values()

    def __len__(self) -> int:
        return sum(map(len, self.by_arm.values()))

    def of(self, arm: str) -> list[Run]:
        return [run for _, run in sorted(self.by_arm.get(arm, {}).items())]

    def pairs(self, arm: str, reference: str) -> list[tuple[Run, Run]]:
        """Runs of both arms with the same seed."""
        seeds = sorted(self.by_arm.get(arm, {}).keys() & self.by_arm.get(reference, {}).keys())
        return [(self.by_arm[arm][seed], self.by_arm[reference][seed]) for seed in seeds]

    def differences(self, metric: str, arm: str, reference: str) -> list[float]:
        """`metric` of `arm` less that of `reference`, a pair each that has both."""
        paired = [(getattr(run, metric), getattr(other, metric)) for run, other in self.pairs(arm, reference)]
        return [value - other for value, other in paired if isfinite(value) and isfinite(other)]
