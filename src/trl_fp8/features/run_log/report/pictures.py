"""Which pictures a page has, in which order, and what each says to somebody who sees the words for the first time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trl_fp8.features.run_log.log_file import Run

from .canvas import Figure
from .curves import Panel, lines_figure, panel_figure
from .results import mismatch_key
from .rollout_pictures import log_prob_figure, position_figure, ratio_figure
from .scales import saturation_figure, scales_figure
from .series import series


@dataclass(frozen=True)
class Picture:
    """A figure with what stands below it; `draw` gives None where nothing was measured."""

    title: str
    meaning: str
    draw: Callable[[], Figure | None]


def training_pictures(runs: Sequence[Run]) -> list[Picture]:
    """How it went, a line a run."""
    panels = (
        ("Mean over the completions of a step.", Panel("reward", "Reward", "reward")),
        ("Mean over the completions of a step.", Panel("completions/mean_length", "Completion length", "tokens")),
        ("Sampling, scoring and training.", Panel("step_time", "Step time", "seconds", steady=True)),
    )
    drawn = [Picture(panel.title, text, lambda panel=panel: panel_figure(runs, panel)) for text, panel in panels]
    text = "How far engine and trainer are apart: mean difference of their log-probs for the sampled tokens."
    return [drawn[0], Picture("Mismatch", text, lambda: _mismatch_figure(runs)), *drawn[1:]]


def run_pictures(run: Run) -> dict[str, list[Picture]]:
    """What only one run can show, under headings."""
    kl, largest, effective, masked = (
        Panel("mismatch/k3_kl", "KL of engine and trainer", "nats a token"),
        Panel("mismatch/logp_difference_max", "Largest log-prob difference", "nats"),
        Panel("correction/effective_sample_size", "Effective sample size", "share of the tokens"),
        Panel("correction/fraction_masked_tokens", "Masked tokens", "share of the tokens"),
    )
    mismatch = [
        Picture(
            "Importance ratio",
            "Probability of each sampled token in the trainer over that in the engine; 1 is no mismatch.",
            lambda: ratio_figure(run),
        ),
        Picture("Log-probs", "Of the latest sampled tokens; on the line both agree.", lambda: log_prob_figure(run)),
        Picture(kl.title, "The mismatch as a divergence (k3 estimate).", lambda: panel_figure([run], kl)),
        Picture(
            "Mismatch by position",
            "The same KL, early and late in a completion.",
            lambda: position_figure(run),
        ),
        Picture(largest.title, "Of a single token in each step.", lambda: panel_figure([run], largest)),
        Picture(
            effective.title,
            "How many tokens the weighted ones are worth; 1 is all of them.",
            lambda: panel_figure([run], effective),
        ),
        Picture(masked.title, "What the correction does not train on.", lambda: _unless_zero(run, masked)),
    ]
    cache = [
        Picture(
            "Scales of the KV cache",
            "FP8 numbers are stored with a scale; each layer has one for q, k and v, set anew at every sync.",
            lambda: scales_figure(run),
        ),
        Picture(
            "Clipped keys and values", "Share that was larger than its scale allows.", lambda: saturation_figure(run)
        ),
    ]
    sync = [Picture("Sync", "Time to give the engine the new weights, and parts of it.", lambda: _sync_figure(run))]
    return {"Engine and trainer": mismatch, "KV cache": cache, "Sync of the weights": sync}


def _mismatch_figure(runs: Sequence[Run]) -> Figure | None:
    curves = {run.name: series(run.logs, key) for run in runs if (key := mismatch_key(run))}
    return lines_figure(curves, Panel("", "Mismatch", "nats"), [run.name for run in runs])


def _unless_zero(run: Run, panel: Panel) -> Figure | None:
    return panel_figure([run], panel) if any(series(run.logs, panel.key)[1]) else None


def _sync_figure(run: Run) -> Figure | None:
    parts = {
        "whole sync": "fp8/sync_seconds",
        "quantizing and writing": "fp8/quantize_seconds",
        "calibrating KV scales": "fp8/calibration_seconds",
    }
    curves = {name: points for name, key in parts.items() if (points := series(run.logs, key, 1000.0))[0]}
    return lines_figure(curves, Panel("", "Sync", "milliseconds", steady=True), list(parts))
