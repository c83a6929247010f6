"""A run, or several, as one HTML file that needs nothing else, with its pictures beside it as PNGs."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from trl_fp8.run.file import Run

from .canvas import Figure, save
from .checks import checks
from .comparison import ladder_figure, rewards_figure
from .curves import TRAINING_PANELS, Panel, curves_figure, series
from .rollouts import log_prob_figure, position_figure, ratio_figure
from .scales import saturation_figure, scales_figure


MISMATCH_PANELS = (
    Panel("mismatch/k3_kl", "KL of rollout and trainer", "k3 estimate, nats"),
    Panel("mismatch/logp_difference_max", "Largest log-prob difference", "nats"),
    Panel("correction/effective_sample_size", "Effective sample size", "share of the tokens"),
    Panel("correction/fraction_masked_tokens", "Tokens masked by the correction", "share of the tokens"),
)
TIME_PANELS = (
    Panel("fp8/sync_seconds", "Sync", "milliseconds", 1000.0, steady=True),
    Panel("fp8/quantize_seconds", "of it, quantization", "milliseconds", 1000.0, steady=True),
    Panel("fp8/calibration_seconds", "Calibration of the KV cache", "milliseconds", 1000.0, steady=True),
    Panel("step_time", "Whole step", "seconds", steady=True),
)


def write_report(runs: Sequence[Run], folder: str | Path) -> Path:
    """Write `folder/report.html` and the pictures in it as PNGs.

    Raises:
        ValueError: A run has logged nothing yet, or two runs have the same name.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"RUN: two folders are called alike ({', '.join(names)}), their pictures would be mixed up.")
    if empty := [run.name for run in runs if not run.logs]:
        raise ValueError(f"RUN={empty[0]!r} has logged nothing yet. Wait for its first step, or set logging_steps=1.")
    folder = Path(folder)
    parts = [_comparison(runs, folder)] if len(runs) > 1 else []
    parts += [_run(run, folder, prefix=f"{run.name}-" if len(runs) > 1 else "") for run in runs]
    style = files(__package__).joinpath("report.css").read_text()
    title = f"FP8 rollouts: {', '.join(names)}"
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )
    path = folder / "report.html"
    path.write_text(page)
    return path


def _comparison(runs: Sequence[Run], folder: Path) -> str:
    pictures = {"reward": lambda: rewards_figure(runs), "mismatch ladder": lambda: ladder_figure(runs)}
    drawn = "".join(_pictures(pictures, folder, ""))
    return f'<section>\n<h2>Side by side</h2>\n<div class="pictures">\n{drawn}</div>\n</section>\n'


def _run(run: Run, folder: Path, prefix: str) -> str:
    answers = "".join(
        f'<tr class="{"fine" if check.fine else "look"}"><th>{escape(check.question)}</th>'
        f"<td>{'ok' if check.fine else 'look'}</td><td>{escape(check.answer)}</td></tr>\n"
        for check in checks(run)
    )
    pictures = {
        "training": lambda: _panels(run, TRAINING_PANELS),
        "mismatch": lambda: _panels(run, MISMATCH_PANELS),
        "importance ratios": lambda: ratio_figure(run),
        "log-probs": lambda: log_prob_figure(run),
        "mismatch by position": lambda: position_figure(run),
        "KV cache scales": lambda: scales_figure(run),
        "KV cache saturation": lambda: saturation_figure(run),
        "times": lambda: _panels(run, TIME_PANELS),
    }
    plan = run.facts["plan"] or "nothing is FP8: this run is TRL's own"
    return (
        f'<section>\n<h2>{escape(run.name)}</h2>\n<table class="checks">\n{answers}</table>\n{_facts(run.facts)}'
        f'<div class="pictures">\n{"".join(_pictures(pictures, folder, prefix))}</div>\n'
        f"<details><summary>What was FP8</summary>\n<pre>{escape(plan)}</pre>\n"
        f"</details>\n<details><summary>Flags</summary>\n{_table(run.facts['flags'])}</details>\n</section>\n"
    )


def _panels(run: Run, panels: Sequence[Panel]) -> Figure | None:
    return curves_figure(run.logs, panels)[0] if any(series(run.logs, panel.key)[0] for panel in panels) else None


def _pictures(pictures: Mapping[str, Callable[[], Figure | None]], folder: Path, prefix: str) -> Iterator[str]:
    for name, draw in pictures.items():
        if (figure := draw()) is not None:
            path = save(figure, folder / f"{prefix}{name.replace(' ', '_')}.png")
            content = base64.b64encode(path.read_bytes()).decode()
            width = round(figure.get_figwidth() * 96)  # CSS pixels an inch
            yield f'<img alt="{escape(name)}" width="{width}" src="data:image/png;base64,{content}">\n'


def _facts(facts: Mapping) -> str:
    correction = facts["correction"] or {}
    model = Path(facts["model"])
    shown = {
        "model": model.name if model.is_absolute() else model,  # a page is shown around, a machine's paths need not be
        "FP8": f"{facts['fp8_linears']} linear layers, {facts['fp8_experts']} layers of experts, "
        f"{facts['fp8_share']:.1%} of parameters; KV cache {facts['kv_cache_dtype']}",
        "kernels": ", ".join(f"{name} ({count})" for name, count in facts["kernels"].items()) or "high precision",
        "correction": ", ".join(f"{key}={value}" for key, value in correction.items() if value) or "none",
        "hardware": f"{facts['processes']} x {facts['hardware']}",
        "versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
    }
    return _table(shown)


def _table(values: Mapping) -> str:
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>\n" for key, value in values.items())
    return f'<table class="facts">\n{rows}</table>\n'
