"""The pictures in the docs that are made of results: learning curves, and the mismatch over steps and over depth."""

from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

from testing.record import interval
from trl_fp8.features.run_log.report.canvas import SERIES, new_figure, save, tidy
from trl_fp8.features.run_log.report.curves import moving


# Mismatches below this are drawn between it and 0, in proportion
SMALLEST = 1e-8
# Policies of benchmarks/measure_depth.py, as the picture calls them
DEPTH_CURVES = {
    "bf16": "BF16 rollouts",
    "fp8": "FP8 rollouts",
    "full": "FP8 rollouts, one forward",
}
# Policies of benchmarks/bench_demo.py likewise
STEP_CURVES = {"bf16": "BF16 rollouts", "fp8_linears_kv": "FP8 rollouts", "fp8_flow": "FP8 rollouts, one forward"}


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
        smooth = [moving(run, window) for run in runs]
        steps = range(1, len(smooth[0]) + 1)
        bands = [interval(values) for values in zip(*smooth, strict=True)]
        means, low, high = ([band[key] for band in bands] for key in ("mean", "low", "high"))
        (line,) = axes.plot(steps, means, label=f"{name} ({len(runs)} seeds)")
        axes.fill_between(steps, low, high, alpha=0.18, color=line.get_color(), linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel(f"reward, mean of {window} steps")
    axes.legend(frameon=False, loc="best")
    return save(figure, path)


def plot_mismatch(curves: Mapping[str, Sequence[float]], path: str | Path) -> Path:
    """Write one PNG: the mismatch at each step, one curve per policy, logarithmic above `SMALLEST`, linear below.

    Args:
        curves: Policies of benchmarks/bench_demo.py -> mismatch by step.
        path: Of the PNG; its folder is made.
    """
    figure = new_figure(7, 3.2)
    axes = figure.subplots()
    axes.set_yscale("symlog", linthresh=SMALLEST, linscale=0.6)
    for (policy, mismatch), colour, style in zip(curves.items(), SERIES, ("-", "--", "-."), strict=False):
        steps = range(1, len(mismatch) + 1)
        axes.plot(steps, mismatch, style, color=colour, linewidth=2, label=STEP_CURVES[policy])
    axes.set_ylim(-SMALLEST / 2, 1)
    ticks = [10.0**exponent for exponent in range(round(log10(SMALLEST)), 1, 2)]
    axes.set_yticks([0, *ticks], ["0: equal bits", *(f"{tick:.0e}" for tick in ticks)])
    axes.minorticks_off()
    tidy(axes, "mean |trainer - rollout| log-prob, nats", "step of the demo", legend="center right")
    return save(figure, path)


def plot_depth(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Write one PNG: the mismatch over layers, a curve per policy, logarithmic above `SMALLEST` and linear below it,
    where 0 has its place. Curves are of random weights, with the range over seeds; marks stand for other weights.

    Args:
        rows: As in benchmarks/measure_depth.py.
        path: Of the PNG; its folder is made.
    """
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    axes.set_yscale("symlog", linthresh=SMALLEST, linscale=0.6)
    markers = dict(
        zip([w for w in dict.fromkeys(row["weights"] for row in rows) if w != "random"], "D*^", strict=False)
    )
    for policy, colour, style in zip(DEPTH_CURVES, SERIES, ("-", "--", "-."), strict=False):
        of = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["layers"])
        drawn = [row for row in of if row["weights"] == "random"]
        means = [row["mismatch_mean"] for row in drawn]
        errors = [[abs(row["mismatch"][side] - row["mismatch_mean"]) for row in drawn] for side in ("min", "max")]
        layers = [row["layers"] for row in drawn]
        bars = {"marker": "o", "capsize": 3, "linestyle": style, "linewidth": 2, "color": colour}
        axes.errorbar(layers, means, errors, **bars, label=DEPTH_CURVES[policy])
        for row in (row for row in of if row["weights"] != "random"):
            marker = markers[row["weights"]]
            axes.plot(row["layers"], row["mismatch_mean"], marker, color=colour, markerfacecolor="none", markersize=8)
    for weights, marker in markers.items():
        axes.plot([], [], marker, color="black", markerfacecolor="none", label=f"{weights} weights")
    axes.set_ylim(-SMALLEST / 2, 1)
    ticks = [10.0**exponent for exponent in range(round(log10(SMALLEST)), 1, 2)]
    axes.set_yticks([0, *ticks], ["0: equal bits", *(f"{tick:.0e}" for tick in ticks)])
    axes.set_xscale("log", base=2)
    depths = sorted({row["layers"] for row in rows})
    axes.set_xticks(depths, list(map(str, depths)))
    axes.minorticks_off()
    tidy(axes, "mean |trainer - rollout| log-prob, nats", "decoder layers", legend="center right")
    return save(figure, path)
