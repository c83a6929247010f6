"""One picture of a run's training, from its log history."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .canvas import MARK, save
from .curves import Panel, curves_figure


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (
    Panel("reward", "Reward", "mean over a step's completions"),
    Panel(
        "sampling/sampling_logp_difference/mean", "Mismatch of rollout and trainer", "mean |log-prob difference|, nats"
    ),
    Panel("completions/mean_length", "Completion length", "mean, tokens"),
    Panel("fp8/sync_seconds", "Sync of policy to engine", "milliseconds", 1000.0, steady=True),
)


def plot_training(
    log_history: Iterable[Mapping[str, Any]],
    path: str | Path,
    title: str = "GRPO with FP8 rollouts",
    held_out: Mapping[int, float] | None = None,
) -> Path:
    """Write `training_figure` as one PNG and return its path.

    Args:
        log_history: `trainer.state.log_history`. Series that it lacks get no panel.
        path: Of the PNG; its folder is made.
        title: Above all panels.
        held_out: Step -> reward on held-out problems, marked in the reward panel.

    Raises:
        ValueError: If `log_history` holds none of the series.
        ImportError: If matplotlib is not installed.
    """
    return save(training_figure(log_history, title, held_out), path)


def training_figure(
    log_history: Iterable[Mapping[str, Any]], title: str | None = None, held_out: Mapping[int, float] | None = None
) -> "Figure":
    """Reward, mismatch, completion length and sync time over the steps, a panel each."""
    figure, axes = curves_figure(log_history, PANELS, title)
    if "reward" in axes and held_out:
        _mark_held_out(axes["reward"], held_out)
        axes["reward"].legend(frameon=False, fontsize=9, loc="best")
    return figure


def _mark_held_out(axes: "Axes", held_out: Mapping[int, float]) -> None:
    steps, rewards = zip(*sorted(held_out.items()), strict=True)
    axes.plot(
        steps,
        rewards,
        linestyle="none",
        marker="D",
        markersize=7,
        color=MARK,
        clip_on=False,
        label="held-out problems",
    )
    for step, reward in zip(steps, rewards, strict=True):
        # Inwards of the panel, and below: rewards rise, so that their curve is above
        offset, side = ((8, -16), "left") if step == steps[0] else ((-4, -18), "right")
        axes.annotate(f"{reward:.2f}", (step, reward), offset, "data", "offset points", ha=side, color=MARK)
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.15 * max(rewards)))
