"""Results of runs in a few figures, each with unit and steps, and the settings in which runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trl_fp8.features.run_log.log_file import Run, ends, series, span
from trl_fp8.recipe.messages import format_bytes


PLACES = ("output_dir", "run_name")  # flags that differ because the runs do
# Mean absolute log-prob difference of a step; TRL's own where no correction of ours reports
MISMATCH = ("mismatch/logp_difference_mean", "sampling/sampling_logp_difference/mean")


@dataclass(frozen=True)
class Result:
    """One figure: what it is called and means, and for one run its value, with more about that."""

    label: str
    meaning: str
    value: str
    note: str


def results(run: Run) -> list[Result]:
    """Return the results that the run's file has data for."""
    facts = run.facts
    found = []
    # The two that change as a run goes, at its end and at its beginning
    of_steps = (
        ("reward", "Final reward", "mean over the completions", ""),
        (mismatch_key(run), "Mismatch", "mean log-prob difference between engine and trainer", " nats"),
    )
    for key, label, meaning, unit in of_steps:
        first, last = ends(run.logs, key) if key else (None, None)
        if last:
            before = f"; {first.mean:.3g} in {first.steps}" if first else ""
            found.append(Result(label, meaning, f"{last.mean:.3g}{unit}", f"{last.steps}{before}"))
    # What a step takes, and what of it the sync
    steps, times = series(run.logs, "step_time")
    if times:
        speed = f"; {rate:,.0f} tokens/s, prompts included" if (rate := _tokens_per_second(run)) else ""
        note = f"median, {span(steps)}{speed}"
        found.append(Result("Step time", "sampling, scoring, training", duration(median(times)), note))
    steps, syncs = series(run.logs, "fp8/sync_seconds")
    if syncs and times:
        share = median(syncs) / median(times)
        note = f"{duration(median(syncs))}, median, {span(steps)}"
        found.append(Result("Sync", "share of a step: new weights to the engine", f"{share:.1%}", note))
    # What FP8 makes of the engine's memory
    share = f"{facts['fp8_share']:.1%}" if facts["fp8_share"] else "none"
    sizes = _sizes(facts.get("weight_bytes"))
    found.append(Result("Weights in FP8", "share of the engine's parameters", share, sizes))
    cache = "high precision" if facts["kv_cache_dtype"] == "auto" else "FP8"
    sizes = _sizes(facts.get("kv_bytes_per_token"), " a token")
    skipped = f"; not layers {skip}" if (skip := facts.get("kv_cache_skip_layers")) else ""
    found.append(Result("KV cache", "the engine's memory of past tokens", cache, f"{sizes}{skipped}"))
    return found


def compared(runs: Sequence[Run]) -> Iterator[list[Result | None]]:
    """Yield rows of results: one for each run, None where it was not measured."""
    found = [{result.label: result for result in results(run)} for run in runs]
    for label in dict.fromkeys(label for each in found for label in each):
        yield [each.get(label) for each in found]


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with their values. An absent flag is `default`."""
    settings = [_settings(run) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each if name not in PLACES)
    rows = {name: [str(each.get(name, "default")) for each in settings] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _settings(run: Run) -> dict[str, Any]:
    facts = run.facts
    shown = {
        "correction of the loss": correction_name(facts),
        "model": model_name(facts),
        "trained": facts.get("trained", "not recorded"),  # by an older version
        "processes": facts["processes"],
        "hardware": facts["hardware"],
    }
    return shown | facts.get("fp8_flags", {}) | facts["flags"]


def mismatch_key(run: Run) -> str | None:
    """Return the name under which the mismatch was logged; None if it was not measured."""
    return next((key for key in MISMATCH if series(run.logs, key)[0]), None)


def model_name(facts: Mapping[str, Any]) -> str:
    """Return the model's name without its folder: a page is shown around."""
    model = Path(facts["model"])
    return model.name if model.is_absolute() else str(model)


def summary(run: Run) -> str:
    """Return a few sentences on the run."""
    facts = run.facts
    done = max(row["step"] for row in run.logs)
    planned = facts["flags"].get("max_steps", 0)
    state = "finished" if any("train_runtime" in row for row in run.logs) else "not finished when this was written"
    steps = f"{done:,} of {planned:,} steps" if planned > done else f"{done:,} step{'s' * (done != 1)}"
    weights = f"FP8 weights ({facts['weight_format']})" if facts.get("weight_format") else "weights in high precision"
    cache = "in high precision" if facts["kv_cache_dtype"] == "auto" else "in FP8"
    sampled = f"vLLM sampled the completions with {weights} and a KV cache {cache}" if facts["plan"] else ""
    correction = f"The mismatch of engine and trainer was corrected in the loss: {correction_name(facts)}"
    parts = (
        f"{facts.get('method', 'GRPO')} on {model_name(facts)}, {steps}, {state}",
        sampled or "Nothing was FP8: completions were sampled in high precision",
        correction if facts.get("correction") else "",
        f"It ran as {facts['processes']} process{'es' if facts['processes'] > 1 else ''} on {facts['hardware']}",
    )
    return " ".join(f"{part}." for part in parts if part)


def correction_name(facts: Mapping[str, Any]) -> str:
    """Return a phrase such as `token-level importance weights, at most 2`."""
    correction = facts.get("correction")
    if not correction:
        return "none"
    level, lowest, highest = (correction.get(key) for key in ("level", "bound_min", "bound_max"))
    bounds = [f"at least {lowest:g}" if lowest else "", f"at most {highest:g}" if highest else ""]
    limits = " and ".join(filter(None, bounds)) + (", or dropped" if correction.get("bound") == "mask" else "")
    weights = f"{level}-level importance weights, {limits}" if level else ""
    rejects = f"{len(correction['reject'])} rejection rules" if correction.get("reject") else ""
    bypass = "the ratio of the loss itself" if correction.get("bypass") else ""
    watched = "measured, not applied" if correction.get("monitor_only") else ""
    return "; ".join(filter(None, (weights, rejects, bypass, watched))) or "none"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _tokens_per_second(run: Run) -> float | None:
    """Return the rate of prompts' and completions' tokens of all processes, after the first logged step."""
    steps, tokens = series(run.logs, "num_tokens")
    timed, seconds = series(run.logs, "step_time")
    if len(steps) < 2:
        return None
    intervals = zip(timed, timed[1:], seconds[1:], strict=False)  # times are means over what was logged at once
    spent = sum((step - before) * each for before, step, each in intervals if steps[0] < step <= steps[-1])
    return (tokens[-1] - tokens[0]) / spent if spent else None


def _sizes(sizes: tuple[int, int] | None, each: str = "") -> str:
    if not sizes:
        return ""
    before, after = map(format_bytes, sizes)
    return f"{after}{each}; {before} in BF16" if before != after else f"{after}{each}"
