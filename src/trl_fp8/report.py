"""What a run came to: a plain-text table of its summary and one picture of its training.

Both take plain data, a summary and `trainer.state.log_history` or their JSON, so that a finished run can be reported
again from its folder. What was not measured is left out: a missing row or panel is never a zero.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

from .plan import format_bytes


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Table


def demo_table(summary: Mapping[str, Any]) -> str:
    """One line per measured fact of `summary`, in a fixed order, then whatever else it holds under its own names.

    Args:
        summary: As in `outputs/demo/summary.json`. None means "not measured". Two keys that make one line (reward at
            start and at end, bytes in BF16 and in the engine) stand alone under their names where the other is
            missing.
    """
    measured = {key: value for key, value in summary.items() if value not in (None, {}, [])}
    lines = []
    for label, keys, show in _LINES:
        if measured.keys() >= set(keys):
            lines.append((label, show(*(measured.pop(key) for key in keys))))
    lines += [(key, _plain(value)) for key, value in measured.items()]
    if not lines:
        raise ValueError(f"summary={dict(summary)!r}: nothing in it was measured; pass the contents of summary.json")
    width = max(len(label) for label, _ in lines)
    rows = [f"{label:<{width}}  {value}" for label, value in lines]
    rule = "-" * max(map(len, rows))
    return "\n".join([rule, *rows, rule])


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _byte_change(before: int, after: int) -> str:
    return f"{format_bytes(before)} -> {format_bytes(after)} ({after / before:.0%})"


# label, the summary's keys that make the line, their values -> text
_LINES: tuple[tuple[str, tuple[str, ...], Callable[..., str]], ...] = (
    ("reward on held-out problems", ("reward_start", "reward_end"), lambda a, b: f"{a:.3f} -> {b:.3f} ({b - a:+.3f})"),
    ("mismatch, mean |log-prob difference|", ("mismatch_mean",), lambda nats: f"{nats:.5f} nats"),
    ("FP8 linear layers", ("fp8_linears",), _plain),
    (
        "routes: used, chosen otherwise",
        ("router_disagreement", "router_own_disagreement"),
        lambda a, b: f"{a:.1%}, {b:.1%}",
    ),
    ("FP8 share of parameters", ("fp8_share",), lambda share: f"{share:.1%}"),
    ("weights, BF16 -> engine", ("weight_bytes_bf16", "weight_bytes_engine"), _byte_change),
    ("KV cache", ("kv_cache_dtype",), _plain),
    ("KV cache per token, BF16 -> engine", ("kv_bytes_per_token_bf16", "kv_bytes_per_token_engine"), _byte_change),
    ("FP8 forward of the trainer", ("fp8_forward",), _plain),
    ("KV cache simulated in the trainer", ("simulate_kv_cache",), _plain),
    ("KV scales from", ("kv_calibration",), _plain),
    ("KV elements saturated, worst step", ("kv_saturation_max",), lambda share: f"{share:.1e}" if share else "none"),
    ("KV scale margin at the end", ("kv_margin_end",), _plain),
    ("calibration, median", ("calibration_seconds_median",), _duration),
    ("sync, median", ("sync_seconds_median",), _duration),
    ("step, median", ("step_seconds_median",), _duration),
    ("audit failures", ("audit_failures",), _plain),
    ("steps", ("steps",), _plain),
    ("training time", ("training_seconds",), _duration),
)


# Picture


@dataclass(frozen=True)
class _Panel:
    """One curve over the steps. `unit` is the axis label; logged values are multiplied by `factor` to be in it.
    `steady` values are expected to stay put: they get their median, which one slow step does not move, instead of a
    moving mean.
    """

    key: str
    title: str
    unit: str
    factor: float = 1.0
    steady: bool = False


_PANELS = (
    _Panel("reward", "Reward", "mean over a step's completions"),
    _Panel(
        "sampling/sampling_logp_difference/mean", "Mismatch of rollout and trainer", "mean |log-prob difference|, nats"
    ),
    _Panel("completions/mean_length", "Completion length", "mean, tokens"),
    _Panel("fp8/sync_seconds", "Sync of policy to engine", "milliseconds", 1000.0, steady=True),
)
# Two-sided 95 % quantiles of Student's t for the mean of n runs
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
_RAW, _TREND, _HELD_OUT = "#9ecae1", "#08519c", "#d94801"


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
    figure = training_figure(log_history, title, held_out)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def plot_rewards(curves: Mapping[str, Sequence[Sequence[float]]], path: str | Path, window: int = 5) -> Path:
    """Write one PNG: the reward of each step, mean over runs with a 95 % band of that mean, one colour per precision.

    Args:
        curves: Precision -> runs (at least two) -> rewards by step, all of one length.
        path: Of the PNG; its folder is made.
        window: Steps of the moving mean that each run is smoothed with first.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=140, layout="constrained")
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
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def plot_ladder(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Write one PNG: a bar per row of a mismatch ladder, in order, with its 95 % interval.

    Args:
        rows: Each with `name`, `mismatch_mean` and `ci95` (low, high), as in benchmarks/measure_mismatch.py.
        path: Of the PNG; its folder is made.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.4 * len(rows) + 1), dpi=140, layout="constrained")
    axes = figure.subplots()
    means = [row["mismatch_mean"] for row in rows]
    errors = [[abs(row["ci95"][side] - row["mismatch_mean"]) for row in rows] for side in (0, 1)]
    positions = range(len(rows), 0, -1)
    axes.barh(positions, means, xerr=errors, color=_RAW, ecolor=_TREND, capsize=3)
    for position, mean in zip(positions, means, strict=True):
        axes.annotate(f"{mean:.2g}", (mean, position), (6, 8), textcoords="offset points", fontsize=8)
    axes.set_yticks(list(positions), [row["name"].replace("_", " ") for row in rows])
    axes.set_xlabel("mismatch: mean |trainer - rollout| log-prob, nats")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def training_figure(
    log_history: Iterable[Mapping[str, Any]], title: str, held_out: Mapping[int, float] | None = None
) -> "Figure":
    """Reward, mismatch, completion length and sync time over the steps, a panel each."""
    rows = list(log_history)
    found = [(panel, steps, values) for panel in _PANELS for steps, values in [_series(rows, panel)] if steps]
    if not found:
        raise ValueError(
            f"log_history with {len(rows)} entries: none has a finite value of {', '.join(p.key for p in _PANELS)}; "
            "train with logging_steps=1 and pass trainer.state.log_history"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_training needs matplotlib: pip install 'trl-fp8[report]'") from error

    columns = min(2, len(found))
    lines = ceil(len(found) / columns)
    # The object interface with its own canvas: no global backend or open figure of the caller's is touched
    figure = Figure(figsize=(5.6 * columns, 0.6 + 3.2 * lines), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    last = max(max(steps) for _, steps, _ in found)
    for index, (panel, steps, values) in enumerate(found):
        axes = figure.add_subplot(lines, columns, index + 1)
        _draw(axes, panel, steps, values)
        if panel.key == "reward" and held_out:
            _mark_held_out(axes, held_out)
        axes.set_xlim(-0.02 * last, 1.02 * last)
        axes.set_xlabel("step", fontsize=9)
        axes.legend(frameon=False, fontsize=9, loc="best")
    return figure


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the `window - 1` before it; of fewer at the start."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _series(rows: Sequence[Mapping[str, Any]], panel: _Panel) -> tuple[list[int], list[float]]:
    """Steps in order and their values, without NaN and Inf. A step logged twice, by a resumed run, counts once: the
    last time.
    """
    logged = {row["step"]: row[panel.key] for row in rows if "step" in row and panel.key in row}
    points = [(step, panel.factor * value) for step, value in sorted(logged.items()) if isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def _draw(axes: "Axes", panel: _Panel, steps: Sequence[int], values: Sequence[float]) -> None:
    middle, window = median(values), max(5, len(values) // 10)
    axes.plot(steps, values, color=_RAW, linewidth=1, marker=".", markersize=4, label="logged")
    if panel.steady:
        axes.axhline(middle, color=_TREND, linewidth=1.5, label=f"median {middle:.3g}")
    elif len(values) > window:
        axes.plot(steps, moving_mean(values, window), color=_TREND, linewidth=2, label=f"moving mean of {window}")
    unit = panel.unit
    if min(values) > 0 and max(values) > 10 * middle:  # one slow step would flatten all others
        unit += ", log scale"
        axes.set_yscale("log", subs=(2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=min(0.0, 1.1 * min(values)))
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _mark_held_out(axes: "Axes", held_out: Mapping[int, float]) -> None:
    steps, rewards = zip(*sorted(held_out.items()), strict=True)
    axes.plot(
        steps,
        rewards,
        linestyle="none",
        marker="D",
        markersize=7,
        color=_HELD_OUT,
        clip_on=False,
        label="held-out problems",
    )
    for step, reward in zip(steps, rewards, strict=True):
        # Inwards of the panel, and below: rewards rise, so that their curve is above
        offset, side = ((8, -16), "left") if step == steps[0] else ((-4, -18), "right")
        axes.annotate(f"{reward:.2f}", (step, reward), offset, "data", "offset points", ha=side, color=_HELD_OUT)
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.15 * max(rewards)))
