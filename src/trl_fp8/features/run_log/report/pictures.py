"""The pictures of a page in their order, each explained for somebody who sees the words for the first time."""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_fp8.features.run_log.log_file import Run, series
from trl_fp8.features.run_log.report.canvas import Figure

from .curves import Panel, lines_figure, panel_figure
from .results import mismatch_key
from .rollout_pictures import log_prob_figure, position_figure, ratio_figure, saturation_figure, scales_figure


REWARD = Panel("reward", "Reward", "reward", "Mean over the completions of a step.")
MISMATCH = Panel(
    "",  # of each run, by its `mismatch_key`
    "Mismatch",
    "nats",
    "How far engine and trainer are apart: mean log-prob difference over the sampled tokens.",
)
LENGTH = Panel("completions/mean_length", "Completion length", "tokens", "Mean over the completions of a step.")
TIME = Panel("step_time", "Step time", "seconds", "Sampling, scoring and training.", steady=True)
KL = Panel("mismatch/k3_kl", "KL of engine and trainer", "nats a token", "The mismatch as a divergence (k3 estimate).")
LARGEST = Panel(
    "mismatch/logp_difference_max", "Largest log-prob difference", "nats", "Of a single token in each step."
)
SAMPLE_SIZE = Panel(
    "correction/effective_sample_size",
    "Effective sample size",
    "share of the tokens",
    "How many tokens the weighted ones are worth; 1 is all of them.",
)
MASKED = Panel(
    "correction/fraction_masked_tokens",
    "Masked tokens",
    "share of the tokens",
    "What the correction does not train on.",
)
SYNC = Panel("", "Sync", "milliseconds", "Time to give the engine the new weights, and parts of it.", steady=True)
SYNC_PARTS = {
    "whole sync": "fp8/sync_seconds",
    "quantizing and writing": "fp8/quantize_seconds",
    "calibrating KV scales": "fp8/calibration_seconds",
    "server paused": "fp8/pause_seconds",
}


@dataclass(frozen=True)
class Picture:
    """A figure with what stands above it; None where nothing was measured."""

    title: str
    meaning: str
    figure: Figure | None


def training_pictures(runs: Sequence[Run]) -> list[Picture]:
    """Return the pictures of the training, a line a run."""
    curves = {}
    for run in runs:
        if key := mismatch_key(run):
            curves[run.name] = series(run.logs, key)
    mismatch = lines_figure(curves, MISMATCH, [run.name for run in runs])
    reward, length, time = (_logged(runs, panel) for panel in (REWARD, LENGTH, TIME))
    return [reward, Picture(MISMATCH.title, MISMATCH.meaning, mismatch), length, time]


def run_pictures(run: Run) -> dict[str, list[Picture]]:
    """Return the pictures that only one run can show, by heading."""
    ratio = "Probability of each sampled token in the trainer over that in the engine; 1 is no mismatch."
    mismatch = [
        Picture("Importance ratio", ratio, ratio_figure(run)),
        Picture("Log-probs", "Of the latest sampled tokens; on the line both agree.", log_prob_figure(run)),
        _logged([run], KL),
        Picture("Mismatch by position", "The same KL, early and late in a completion.", position_figure(run)),
        _logged([run], LARGEST),
        _logged([run], SAMPLE_SIZE),
    ]
    if any(series(run.logs, MASKED.key)[1]):
        mismatch.append(_logged([run], MASKED))
    scales = "FP8 numbers are stored with a scale; each layer has one for q, k and v, set anew at every sync."
    cache = [
        Picture("Scales of the KV cache", scales, scales_figure(run)),
        Picture("Clipped keys and values", "Share that was larger than its scale allows.", saturation_figure(run)),
    ]
    times = {name: series(run.logs, key, factor=1000.0) for name, key in SYNC_PARTS.items()}
    measured = {name: (steps, values) for name, (steps, values) in times.items() if steps}
    sync = Picture(SYNC.title, SYNC.meaning, lines_figure(measured, SYNC, list(SYNC_PARTS)))
    return {"Engine and trainer": mismatch, "KV cache": cache, "Sync of the weights": [sync]}


def _logged(runs: Sequence[Run], panel: Panel) -> Picture:
    return Picture(panel.title, panel.meaning, panel_figure(runs, panel))
