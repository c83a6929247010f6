"""Logged values over the steps, a panel each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from statistics import fmean, median
from typing import Any

from .canvas import RAW, TREND, Axes, Figure, new_figure, tidy


@dataclass(frozen=True)
class Panel:
    """One curve over the steps."""

    key: str
    title: str
    unit: str  # label of the axis
    factor: float = 1.0  # from what was logged to `unit`
    steady: bool = False  # expected to stay put: a median, which one slow step does not move, not a moving mean


TRAINING_PANELS = (
    Panel("reward", "Reward", "mean over a step's completions"),
    Panel(
        "sampling/sampling_logp_difference/mean", "Mismatch of rollout and trainer", "mean |log-prob difference|, nats"
    ),
    Panel("completions/mean_length", "Completion length", "mean, tokens"),
    Panel("fp8/sync_seconds", "Sync of policy to engine", "milliseconds", 1000.0, steady=True),
)


def curves_figure(
    log_history: Iterable[Mapping[str, Any]], panels: Sequence[Panel], title: str | None = None
) -> tuple[Figure, dict[str, Axes]]:
    """A figure with those of `panels` that were logged, and its axes by key. `ValueError` if none was."""
    rows = list(log_history)
    found = [(panel, *series(rows, panel.key, panel.factor)) for panel in panels if series(rows, panel.key)[0]]
    if not found:
        raise ValueError(
            f"log_history with {len(rows)} entries: none has a finite value of {', '.join(p.key for p in panels)}; "
            "train with logging_steps=1 and pass trainer.state.log_history"
        )
    columns = min(2, len(found))
    lines = ceil(len(found) / columns)
    figure = new_figure(5.6 * columns, 0.6 * bool(title) + 3.2 * lines, title)
    last, drawn = max(max(steps) for _, steps, _ in found), {}
    for index, (panel, steps, values) in enumerate(found):
        axes = drawn[panel.key] = figure.add_subplot(lines, columns, index + 1)
        _draw(axes, panel, steps, values)
        axes.set_xlim(-0.02 * last, 1.02 * last)
    return figure, drawn


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the `window - 1` before it; of fewer at the start."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def series(rows: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    """Steps in order and their values, without NaN and Inf."""
    logged = {
        row["step"]: row[key] for row in rows if "step" in row and key in row
    }  # of a step logged twice, the last
    points = [(step, factor * value) for step, value in sorted(logged.items()) if isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def _draw(axes: Axes, panel: Panel, steps: Sequence[int], values: Sequence[float]) -> None:
    middle, window = median(values), max(5, len(values) // 10)
    axes.plot(steps, values, color=RAW, linewidth=1, marker=".", markersize=4, label="logged")
    if panel.steady:
        axes.axhline(middle, color=TREND, linewidth=1.5, label=f"median {middle:.3g}")
    elif len(values) > window:
        axes.plot(steps, moving_mean(values, window), color=TREND, linewidth=2, label=f"moving mean of {window}")
    if is_log := min(values) > 0 and max(values) > 10 * middle:  # one slow step would flatten all others
        axes.set_yscale("log", subs=(2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=min(0.0, 1.1 * min(values)))
    tidy(axes, panel.title, "step", f"{panel.unit}, log scale" if is_log else panel.unit, legend="best")
