"""The pictures in the docs that are made of results: learning curves over seeds, and the mismatch ladder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trl_fp8.report.canvas import RAW, TREND, new_figure, save
from trl_fp8.report.curves import moving_mean


# Two-sided 95 % quantiles of Student's t for the mean of n runs
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


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
