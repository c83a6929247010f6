"""What the addition demo shows at its end: five lines, a table of all that was measured, its training as a picture."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from math import ceil
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from trl_fp8.features.run_log.log_file import series
from trl_fp8.features.run_log.report.canvas import MARK, Axes, Figure, new_figure, save
from trl_fp8.features.run_log.report.curves import Panel, draw_panel
from trl_fp8.recipe.messages import format_bytes


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PANELS = (
    Panel("reward", "Reward", "mean over a step's completions"),
    Panel(
        "sampling/sampling_logp_difference/mean", "Mismatch of rollout and trainer", "mean |log-prob difference|, nats"
    ),
    Panel("completions/mean_length", "Completion length", "mean, tokens"),
    Panel("fp8/sync_seconds", "Sync of policy to engine", "milliseconds", factor=1000.0, steady=True),
)


def plot_training(
    log_history: Iterable[Mapping[str, Any]],
    path: str | Path,
    title: str = "GRPO with FP8 rollouts",
    held_out: Mapping[int, float] | None = None,
) -> Path:
    """Write `training_figure` as one PNG, whose folder is made, and return its path."""
    return save(training_figure(log_history, title, held_out), path)


def training_figure(
    log_history: Iterable[Mapping[str, Any]], title: str | None = None, held_out: Mapping[int, float] | None = None
) -> Figure:
    """Reward, mismatch, completion length and sync time over the steps, a panel each.

    Args:
        log_history: `trainer.state.log_history`. Series that it lacks get no panel.
        title: Above all panels.
        held_out: Step -> reward on held-out problems, marked in the reward panel.

    Raises:
        ValueError: `log_history` holds none of the series.
    """
    rows = list(log_history)
    curves = {panel: series(rows, panel.key, panel.factor) for panel in PANELS}
    found = [(panel, *points) for panel, points in curves.items() if points[0]]
    if not found:
        raise ValueError(
            f"log_history with {len(rows)} entries: none has a finite value of {', '.join(p.key for p in PANELS)}; "
            "train with logging_steps=1 and pass trainer.state.log_history"
        )
    columns = min(2, len(found))
    lines = ceil(len(found) / columns)
    figure = new_figure(5.6 * columns, 0.6 * bool(title) + 3.2 * lines)
    if title:
        figure.suptitle(title, fontsize=14, fontweight="bold")
    last = max(max(steps) for _, steps, _ in found)
    for index, (panel, steps, values) in enumerate(found):
        axes = figure.add_subplot(lines, columns, index + 1)
        draw_panel(axes, panel, steps, values)
        axes.set_xlim(-0.02 * last, 1.02 * last)
        if panel.key == "reward" and held_out:
            _mark_held_out(axes, held_out)
            axes.legend(frameon=False, fontsize=9, loc="best")
    return figure


def _mark_held_out(axes: Axes, held_out: Mapping[int, float]) -> None:
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


class Reference(NamedTuple):
    """What the same training came to with BF16 rollouts, and where that is from."""

    reward_end: float
    mismatch: float
    source: str


def stored_reference(start: float, steps: int, folder: Path = RESULTS) -> Reference | None:
    """BF16 runs of this many steps that began with the same policy, which pretraining makes alike on CPUs of one kind;
    None if no result file has any.
    """
    for path in sorted(folder.glob("demo*_cpu.json")):
        record = json.loads(path.read_text())
        if "bf16" not in record["results"]:
            continue
        runs, rewards = record["results"]["bf16"], record["results"]["rewards"]["bf16"]
        if abs(runs["reward_start"]["median"] - start) < 0.005 and len(rewards[0]) == steps:
            host = next(part for part in record["hardware"].split(", ") if part.startswith("AVX"))
            source = f"stored: {runs['seeds']} seeds, {host}"
            return Reference(runs["reward_end"]["median"], runs["mismatch_mean"]["median"], source)
    return None


def headline(summary: Mapping[str, Any], bf16: Reference | None, folder: str | Path) -> str:
    """Five lines of 80 columns for a reader who sees all of this for the first time."""
    accuracy = f"{summary['reward_start']:.3f} -> {summary['reward_end']:.3f}"
    accuracy += f"; with BF16 rollouts {bf16.reward_end:.3f} ({bf16.source})" if bf16 else ""
    mismatch = "not measured"
    if (nats := summary["mismatch_mean"]) is not None:
        mismatch = f"{nats:.4f} nats between trainer and engine over {summary['steps']} steps"
        mismatch += f"; with BF16 {bf16.mismatch:.4f}" if bf16 else ""
    fp8, audits = "nothing", "none, because nothing is FP8"
    if before := summary["weight_bytes_bf16"]:
        layers = summary["fp8_linears"] + summary["fp8_experts"]
        after, cache = summary["weight_bytes_engine"], summary["kv_cache_dtype"] == "fp8"
        what = f"{layers} layers and the KV cache" if cache else f"{layers} layers"
        share = f"{summary['fp8_share']:.1%} FP8"
        fp8 = f"{what}; weights {format_bytes(before)} -> {format_bytes(after)} ({share})"
        audits = f"{summary['audit_failures']} differences found in the engine after {summary['steps']} syncs"
        if (sent := summary.get("sync_bytes_median")) is not None:
            audits += f" of {format_bytes(sent)}"
    rows = {"accuracy": accuracy, "mismatch": mismatch, "FP8": fp8, "audits": audits}
    # make's environment may not be active
    command = "trl-fp8" if which("trl-fp8") else os.path.relpath(Path(sys.executable).with_name("trl-fp8"))
    rows["next"] = f"{command} report {folder}" + ("" if bf16 else "   (ARGS=--compare: BF16, too)")
    return "\n".join(f"{label:<10}{text}" for label, text in rows.items())


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
    ("sent by a sync, median", ("sync_bytes_median",), format_bytes),
    ("step, median", ("step_seconds_median",), _duration),
    ("audit failures", ("audit_failures",), _plain),
    ("steps", ("steps",), _plain),
    ("training time", ("training_seconds",), _duration),
)
