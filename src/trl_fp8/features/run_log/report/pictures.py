"""The report's pictures, in order, each with a sentence or two for a first-time reader."""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_fp8.features.run_log.log_file import Run, series
from trl_fp8.features.run_log.report.canvas import Figure

from .curves import Panel, lines_figure, panel_figure
from .results import mismatch_key
from .rollout_pictures import log_prob_figure, position_figure, ratio_figure, saturation_figure, scales_figure


REWARD = Panel(
    key="reward",
    title="Reward",
    unit="reward",
    meaning="Mean over the completions of a step.",
)
MISMATCH = Panel(
    key=None,  # runs may have logged it under different names: see `mismatch_key`
    title="Mismatch",
    unit="nats",
    meaning="How far engine and trainer are apart: mean absolute log-prob difference over the sampled tokens.",
)
LENGTH = Panel(
    key="completions/mean_length",
    title="Completion length",
    unit="tokens",
    meaning="Mean over the completions of a step.",
)
TIME = Panel(
    key="step_time",
    title="Step time",
    unit="seconds",
    meaning="Sampling, scoring and training.",
    steady=True,
)
KL = Panel(
    key="mismatch/k3_kl",
    title="KL of engine and trainer",
    unit="nats a token",
    meaning="The mismatch as a divergence (k3 estimate).",
)
LARGEST = Panel(
    key="mismatch/logp_difference_max",
    title="Largest log-prob difference",
    unit="nats",
    meaning="The token of each step on which engine and trainer differ most.",
)
SAMPLE_SIZE = Panel(
    key="correction/effective_sample_size",
    title="Effective sample size",
    unit="share of the tokens",
    meaning="Share of the tokens that would carry as much information if all had equal weight. With 1 the importance "
    "weights cost nothing.",
)
MASKED = Panel(
    key="correction/fraction_masked_tokens",
    title="Masked tokens",
    unit="share of the tokens",
    meaning="Tokens that the correction leaves out of the training.",
)
SYNC = Panel(
    key=None,  # several lines: see SYNC_PARTS
    title="Sync",
    unit="milliseconds",
    meaning="Time to give the engine the new weights, and parts of it.",
    steady=True,
)
SYNC_PARTS = {  # name of a line -> logged metric
    "whole sync": "fp8/sync_seconds",
    "quantizing and writing": "fp8/quantize_seconds",
    "calibrating KV scales": "fp8/calibration_seconds",
    "server paused": "fp8/pause_seconds",
}


@dataclass(frozen=True)
class Picture:
    """A figure with its title and an explanation; the figure is None if nothing was measured."""

    title: str
    meaning: str
    figure: Figure | None


def training_pictures(runs: Sequence[Run]) -> list[Picture]:
    """Return the pictures of the training, with one line per run."""
    curves = {}
    for run in runs:
        key = mismatch_key(run)
        if key is not None:
            curves[run.name] = series(run.logs, key)
    # `names` also has runs without a curve, so that a run has the same colour in all pictures
    mismatch = lines_figure(curves, MISMATCH, names=[run.name for run in runs])
    return [
        _picture(runs, REWARD),
        Picture(MISMATCH.title, MISMATCH.meaning, mismatch),
        _picture(runs, LENGTH),
        _picture(runs, TIME),
    ]


def run_pictures(run: Run) -> dict[str, list[Picture]]:
    """Return the pictures of a single run, by heading."""
    ratio_meaning = (
        "Each sampled token's probability in the trainer over that in the engine; 1 is no mismatch. The outermost two "
        "bins hold all tokens beyond. One line is of all tokens, one of the last quarter of the run."
    )
    log_probs_meaning = "The latest sampled tokens. On the line engine and trainer agree."
    position_meaning = "The same KL, early and late in a completion."
    mismatch = [
        Picture("Importance ratio", ratio_meaning, ratio_figure(run)),
        Picture("Log-probs", log_probs_meaning, log_prob_figure(run)),
        _picture([run], KL),
        Picture("Mismatch by position", position_meaning, position_figure(run)),
        _picture([run], LARGEST),
        _picture([run], SAMPLE_SIZE),
    ]
    _, masked_shares = series(run.logs, MASKED.key)
    if any(masked_shares):
        mismatch.append(_picture([run], MASKED))
    scales_meaning = "FP8 numbers are stored with a scale; each layer has one for q, k and v, set anew at every sync."
    saturation_meaning = "Share that was larger than its scale allows."
    cache = [
        Picture("Scales of the KV cache", scales_meaning, scales_figure(run)),
        Picture("Clipped keys and values", saturation_meaning, saturation_figure(run)),
    ]
    times = {name: series(run.logs, key, factor=1000.0) for name, key in SYNC_PARTS.items()}
    measured = {name: (steps, values) for name, (steps, values) in times.items() if steps}
    # `names` also has parts without times, so that a part has the same colour in all reports
    sync = Picture(SYNC.title, SYNC.meaning, lines_figure(measured, SYNC, names=list(SYNC_PARTS)))
    return {"Engine and trainer": mismatch, "KV cache": cache, "Sync of the weights": [sync]}


def _picture(runs: Sequence[Run], panel: Panel) -> Picture:
    return Picture(panel.title, panel.meaning, panel_figure(runs, panel))
