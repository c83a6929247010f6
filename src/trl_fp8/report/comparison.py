"""Several runs side by side."""

from collections.abc import Sequence
from statistics import fmean

from trl_fp8.run.file import Run

from .canvas import RAW, SERIES, TREND, Figure, new_figure, tidy
from .curves import moving_mean, series


def rewards_figure(runs: Sequence[Run], window: int = 5) -> Figure | None:
    """Reward over the steps, a line a run; None if none has rewards."""
    curves = {run.name: points for run in runs if (points := series(run.logs, "reward"))[0]}
    if not curves:
        return None
    axes = new_figure(8, 3.8).subplots()
    for color, (name, (steps, rewards)) in zip(SERIES, curves.items(), strict=False):
        axes.plot(steps, rewards, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, moving_mean(rewards, window), color=color, linewidth=2, label=name)
    title = f"Reward, moving mean of {window} logged steps"
    return tidy(axes, title, "step", "mean over a step's completions", legend="best")


def ladder_figure(runs: Sequence[Run]) -> Figure | None:
    """Mismatch of each run: mean over its logged steps, with the middle 80 % of them; None if it was not measured."""
    measured = {run.name: values for run in runs if (values := mismatches(run))}
    if not measured:
        return None
    axes = new_figure(8, 0.5 * len(measured) + 1.3).subplots()
    for position, values in zip(range(len(measured), 0, -1), measured.values(), strict=True):
        mean, ordered = fmean(values), sorted(values)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        reach = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        axes.barh(position, mean, xerr=reach, color=RAW, ecolor=TREND, capsize=3)
        axes.annotate(f"{mean:.2g}", (max(mean, high), position), (6, -3), textcoords="offset points", fontsize=9)
    axes.set_yticks(range(len(measured), 0, -1), list(measured))
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    return tidy(axes, "Mismatch: mean of the logged steps, and where the middle 80 % of them are", "nats")


def mismatches(run: Run) -> list[float]:
    """Mean absolute log-prob difference of each logged step; TRL's own where no correction of ours reports."""
    keys = ("mismatch/logp_difference_mean", "sampling/sampling_logp_difference/mean")
    return next((values for key in keys if (values := series(run.logs, key)[1])), [])
