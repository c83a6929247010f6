"""Logged values over the steps: one panel per metric, one line per run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from trl_fp8.features.run_log.log_file import Run, series
from trl_fp8.features.run_log.report.canvas import RAW, SERIES, STYLES, TREND, Axes, Figure, new_axes, tidy


Curves = Mapping[str, tuple[list[int], list[float]]]  # name of a line -> its steps and values


@dataclass(frozen=True)
class Panel:
    """A metric over the steps."""

    key: str | None  # name under which it was logged; None: `lines_figure` gets the values
    title: str
    unit: str  # label of the axis
    meaning: str = ""  # a sentence for a first-time reader
    factor: float = 1.0  # turns the logged value into `unit`
    steady: bool = False  # expected not to change: shown by its median, which one slow step does not move


def panel_figure(runs: Sequence[Run], panel: Panel) -> Figure | None:
    """Draw a metric with one line per run. Return None if no run has logged it."""
    curves = {run.name: series(run.logs, panel.key, panel.factor) for run in runs}
    measured = {name: (steps, values) for name, (steps, values) in curves.items() if steps}
    return lines_figure(measured, panel, names=list(curves))


def lines_figure(curves: Curves, panel: Panel, names: Sequence[str]) -> Figure | None:
    """Draw `curves` under the title of `panel`. Return None if there is no curve.

    If `names` has one name, `draw_panel` draws its curve. Otherwise a curve's place in `names` decides its colour.
    `names` also has runs without data, so that a run has the same colour in all panels.
    """
    if not curves:
        return None
    axes = new_axes()
    if len(names) == 1:  # so there is only one curve
        steps, values = curves[names[0]]
        return draw_panel(axes, panel, steps, values)
    longest = max(len(steps) for steps, _ in curves.values())
    window = max(5, longest // 10)
    all_values = []
    for name, (steps, values) in curves.items():
        index = names.index(name)
        color = SERIES[index % len(SERIES)]
        style = STYLES[index // len(SERIES) % len(STYLES)]
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        label = name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"
        smooth = moving(values, window, median if panel.steady else fmean)
        axes.plot(steps, smooth, color=color, linestyle=style, linewidth=1.8, label=label)
        all_values += values
    return _finish(axes, panel, all_values)


def draw_panel(axes: Axes, panel: Panel, steps: Sequence[int], values: Sequence[float]) -> Figure:
    """Draw one curve with its median if the metric is steady, else with its moving mean."""
    window = max(5, len(values) // 10)
    marker = "." if len(values) <= 100 else None
    axes.plot(steps, values, color=RAW, linewidth=1, marker=marker, markersize=4, label="logged")
    if panel.steady:
        middle = median(values)
        axes.axhline(middle, color=TREND, linewidth=1.5, label=f"median {middle:.3g}")
    elif len(values) > window:
        axes.plot(steps, moving(values, window), color=TREND, linewidth=2, label=f"moving mean of {window}")
    return _finish(axes, panel, values)


def _finish(axes: Axes, panel: Panel, values: Sequence[float]) -> Figure:
    unit = panel.unit
    if min(values) > 0 and max(values) > 10 * median(values):  # on a linear scale one slow step would flatten the rest
        unit += ", log scale"
        axes.set_yscale("log", subs=(2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=min(0.0, 1.1 * min(values)))
    return tidy(axes, panel.title, "step", unit, legend="best")


def moving(values: Sequence[float], window: int, middle: Callable[[Sequence[float]], float] = fmean) -> list[float]:
    """Return for each value the mean, or another `middle`, of this value and up to `window - 1` values before it."""
    return [middle(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
