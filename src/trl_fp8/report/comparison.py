"""Several runs, or several precisions, side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from trl_fp8.run.file import Run

from .canvas import RAW, SERIES, TREND, new_figure, save, tidy
from .curves import Panel, moving_mean, series


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Two-sided 95 % quantiles of Student's t for the mean of n runs
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
REWARD = Panel("reward", "", "")
MISMATCH = Panel("mismatch/logp_difference_mean", "", "")
TRL_MISMATCH = Panel("sampling/sampling_logp_difference/mean", "", "")  # where no correction of ours reports


def plot_rewards(curves: Mapping[str, Sequence[Sequence[float]]], path: str | Path, window: int = 5) -> Path:
    """Write one PNG: the reward of each step, mean over runs with a 95 % band of that mean, one colour per precision.

    Args:
        curves: Precision -> runs (at least two) -> rewards by step, all of one length.
        path: Of the PNG; its folder is made.
        window: Steps of the moving mean that each run is smoothed with first.
    """
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    for name, runs in curves.items():
        smooth = [moving_mean(run, window) for run in runs]
        steps = range(1, len(smooth[0]) + 1)
        means = [fmean(values) for values in zip(*smooth, strict=True)]
        half = T_95[len(runs)] / len(runs) ** 0.5
        bands = [half * stdev(values) for values in zip(*smooth, strict=True)]
        (line,) = axes.plot(steps, means, label=f"{name} ({len(runs)} seeds)")
        low, high = ([m + sign * b for m, b in zip(means, bands, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, alpha=0.18, color=line.get_color(), linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel(f"reward, mean of {window} steps")
    axes.legend(frameon=False, loc="best")
    return save(figure, path)


def plot_ladder(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Write one PNG: a bar per row of a mismatch ladder, in order, with its 95 % interval.

    Args:
        rows: Each with `name`, `mismatch_mean` and `ci95` (low, high), as in benchmarks/measure_mismatch.py.
        path: Of the PNG; its folder is made.
    """
    figure = new_figure(8, 0.4 * len(rows) + 1)
    axes = figure.subplots()
    means = [row["mismatch_mean"] for row in rows]
    errors = [[abs(row["ci95"][side] - row["mismatch_mean"]) for row in rows] for side in (0, 1)]
    positions = range(len(rows), 0, -1)
    axes.barh(positions, means, xerr=errors, color=RAW, ecolor=TREND, capsize=3)
    for position, mean in zip(positions, means, strict=True):
        axes.annotate(f"{mean:.2g}", (mean, position), (6, 8), textcoords="offset points", fontsize=8)
    axes.set_yticks(list(positions), [row["name"].replace("_", " ") for row in rows])
    axes.set_xlabel("mismatch: mean |trainer - rollout| log-prob, nats")
    return save(figure, path)


def rewards_figure(runs: Sequence[Run], window: int = 5) -> "Figure | None":
    """Reward over the steps, a line a run; None if none has rewards."""
    curves = {run.name: points for run in runs if (points := series(run.logs, REWARD))[0]}
    if not curves:
        return None
    figure = new_figure(8, 3.8)
    axes = figure.subplots()
    for color, (name, (steps, rewards)) in zip(SERIES, curves.items(), strict=False):
        axes.plot(steps, rewards, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, moving_mean(rewards, window), color=color, linewidth=2, label=name)
    tidy(axes, f"Reward, moving mean of {window} logged steps", "step", "mean over a step's completions")
    axes.legend(frameon=False, fontsize=9, loc="best")
    return figure


def ladder_figure(runs: Sequence[Run]) -> "Figure | None":
    """Mismatch of each run: mean over its logged steps, with the middle 80 % of them; None if it was not measured."""
    measured = {run.name: values for run in runs if (values := mismatches(run))}
    if not measured:
        return None
    figure = new_figure(8, 0.5 * len(measured) + 1.3)
    axes = figure.subplots()
    for position, values in zip(range(len(measured), 0, -1), measured.values(), strict=True):
        mean, ordered = fmean(values), sorted(values)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        reach = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        axes.barh(position, mean, xerr=reach, color=RAW, ecolor=TREND, capsize=3)
        axes.annotate(f"{mean:.2g}", (max(mean, high), position), (6, -3), textcoords="offset points", fontsize=9)
    axes.set_yticks(range(len(measured), 0, -1), list(measured))
    axes.margins(x=0.12)
    tidy(axes, "Mismatch: mean of the logged steps, and where the middle 80 % of them are", "nats")
    axes.set_xlim(left=0)
    return figure


def mismatches(run: Run) -> list[float]:
    """Mean absolute log-prob difference of each logged step."""
    return series(run.logs, MISMATCH)[1] or series(run.logs, TRL_MISMATCH)[1]
