"""What a run has logged under one name: over the steps, at its beginning, at its end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any


LAST = 10  # logged steps at either end over which a metric is averaged, so that one batch does not decide


@dataclass(frozen=True)
class Stretch:
    """Mean of a metric over consecutive logged steps."""

    mean: float
    steps: str  # which


def series(rows: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    """Steps in order and their values, without NaN and Inf."""
    logged = {
        row["step"]: row[key] for row in rows if "step" in row and row.get(key) is not None
    }  # of a step logged twice, the last
    points = [(step, factor * value) for step, value in sorted(logged.items()) if isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def ends(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[Stretch | None, Stretch | None]:
    """The first and the last logged steps: `LAST` of them, or half of what there is. One step is only the last."""
    steps, values = series(rows, key)
    count = max(1, min(LAST, len(steps) // 2))
    first = Stretch(fmean(values[:count]), span(steps[:count])) if len(steps) > 1 else None
    return first, Stretch(fmean(values[-count:]), span(steps[-count:])) if steps else None


def span(steps: Sequence[int]) -> str:
    """`[1, 2, 3]` -> `steps 1 to 3`."""
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def moving(values: Sequence[float], window: int, middle: Callable[[Sequence[float]], float] = fmean) -> list[float]:
    """Mean, or another `middle`, of each value and the `window - 1` before it; of fewer at the start."""
    return [middle(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
