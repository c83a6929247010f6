"""The results of a run in a few numbers, each with its unit and steps, and the settings in which runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from trl_fp8.features.run_log.log_file import Run, ends, series, span
from trl_fp8.recipe.messages import format_bytes


PLACES = ("output_dir", "run_name")  # flags that differ between any two runs
# Metrics that are the mean absolute log-prob difference of a step. This package logs the first only with its own
# correction, TRL the second also without it
MISMATCH = ("mismatch/logp_difference_mean", "sampling/sampling_logp_difference/mean")


@dataclass(frozen=True)
class Result:
    """One number of a run: its name and meaning, the value with its unit, and a note on the value."""

    label: str
    meaning: str
    value: str
    note: str


def results(run: Run) -> list[Result]:
    """Return the results that the run's file has data for."""
    facts = run.facts
    found = []
    # Two metrics that change during a run: their values at its end and at its beginning
    changing = (
        ("reward", "Final reward", "mean over the completions", ""),
        (mismatch_key(run), "Mismatch", "mean absolute log-prob difference of engine and trainer", " nats"),
    )
    for key, label, meaning, unit in changing:
        if key is None:
            continue
        first, last = ends(run.logs, key)
        if last:
            at_start = f"; {first.mean:.3g} in {first.steps}" if first else ""
            found.append(Result(label, meaning, f"{last.mean:.3g}{unit}", f"{last.steps}{at_start}"))
    # Time of a step, and the share of the sync
    steps, times = series(run.logs, "step_time")
    if times:
        note = f"median, {span(steps)}"
        rate = _tokens_per_second(run)
        if rate:
            note += f"; {rate:,.0f} tokens/s, prompts included"
        found.append(Result("Step time", "sampling, scoring, training", duration(median(times)), note))
    steps, syncs = series(run.logs, "fp8/sync_seconds")
    if syncs and times:
        share = median(syncs) / median(times)
        note = f"{duration(median(syncs))}, median, {span(steps)}"
        found.append(Result("Sync", "share of a step: new weights to the engine", f"{share:.1%}", note))
    # Memory of the engine
    share = f"{facts['fp8_share']:.1%}" if facts["fp8_share"] else "none"
    found.append(
        Result("Weights in FP8", "share of the engine's parameters", share, _sizes(facts.get("weight_bytes")))
    )
    cache = "high precision" if facts["kv_cache_dtype"] == "auto" else "FP8"
    note = _sizes(facts.get("kv_bytes_per_token"), " a token")
    if facts.get("kv_cache_skip_layers"):
        note += f"; not layers {facts['kv_cache_skip_layers']}"
    found.append(Result("KV cache", "the engine's memory of past tokens", cache, note))
    return found


def compared(runs: Sequence[Run]) -> Iterator[list[Result | None]]:
    """Yield a row for each label: the result of each run, None where it was not measured."""
    results_by_label = [{result.label: result for result in results(run)} for run in runs]
    labels = dict.fromkeys(chain.from_iterable(results_by_label))  # each label once, in order
    for label in labels:
        yield [run_results.get(label) for run_results in results_by_label]


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the settings that differ between runs: name -> the value in each run, `default` for an absent flag."""
    settings = [_settings(run) for run in runs]
    names = dict.fromkeys(chain.from_iterable(settings))  # each name once, in order
    rows = {}
    for name in names:
        values = [str(run_settings.get(name, "default")) for run_settings in settings]
        if name not in PLACES and len(set(values)) > 1:
            rows[name] = values
    return rows


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings of a run: this package's flags, other changed flags, the model and the machine."""
    facts = run.facts
    shown = {
        "correction of the loss": correction_name(facts),
        "model": model_name(facts),
        "trained": facts.get("trained", "not recorded"),  # absent in logs of older versions
        "processes": facts["processes"],
        "hardware": facts["hardware"],
    }
    return shown | facts.get("fp8_flags", {}) | facts["flags"]


def mismatch_key(run: Run) -> str | None:
    """Return the name under which the mismatch was logged; None if it was not measured."""
    for key in MISMATCH:
        steps, _ = series(run.logs, key)
        if steps:
            return key
    return None


def model_name(facts: Mapping[str, Any]) -> str:
    """Return the model's name. Cut a local path to its last part, because a page may be shown to anybody."""
    model = Path(facts["model"])
    return model.name if model.is_absolute() else str(model)


def summary(run: Run) -> str:
    """Return a few sentences on the run."""
    facts = run.facts
    done = max(row["step"] for row in run.logs)
    planned = facts["flags"].get("max_steps", 0)
    state = "finished" if any("train_runtime" in row for row in run.logs) else "not finished when this was written"
    steps = f"{done:,} step{'' if done == 1 else 's'}"
    if planned > done:
        steps = f"{done:,} of {planned:,} steps"
    weights = f"FP8 weights ({facts['weight_format']})" if facts.get("weight_format") else "weights in high precision"
    cache = "in high precision" if facts["kv_cache_dtype"] == "auto" else "in FP8"
    sentences = [f"{facts.get('method', 'GRPO')} on {model_name(facts)}, {steps}, {state}."]
    if facts["plan"]:
        sentences.append(f"vLLM sampled the completions with {weights} and a KV cache {cache}.")
    else:
        sentences.append("Nothing was FP8: completions were sampled in high precision.")
    if facts.get("correction"):
        sentences.append(f"The mismatch of engine and trainer was corrected in the loss: {correction_name(facts)}.")
    processes = f"{facts['processes']} process{'es' if facts['processes'] > 1 else ''}"
    sentences.append(f"It ran as {processes} on {facts['hardware']}.")
    return " ".join(sentences)


def correction_name(facts: Mapping[str, Any]) -> str:
    """Return a phrase such as `token-level importance weights, at most 2`."""
    correction = facts.get("correction")
    if not correction:
        return "none"
    phrases = []
    if correction.get("level"):
        bounds = {"at least": correction.get("bound_min"), "at most": correction.get("bound_max")}
        limits = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound)
        dropped = ", or dropped" if correction.get("bound") == "mask" else ""
        phrases.append(f"{correction['level']}-level importance weights, {limits}{dropped}")
    if correction.get("reject"):
        phrases.append(f"{len(correction['reject'])} rejection rules")
    if correction.get("bypass"):
        phrases.append("the ratio of the loss itself")
    if correction.get("monitor_only"):
        phrases.append("measured, not applied")
    return "; ".join(phrases) or "none"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _tokens_per_second(run: Run) -> float | None:
    """Return the tokens per second of all processes, prompts and completions, after the first logged step."""
    steps, tokens = series(run.logs, "num_tokens")
    timed_steps, step_seconds = series(run.logs, "step_time")
    if len(steps) < 2:
        return None
    seconds = 0.0
    # A logged time is the mean over the steps since the previous log
    for before, step, mean_seconds in zip(timed_steps, timed_steps[1:], step_seconds[1:], strict=False):
        if steps[0] < step <= steps[-1]:
            seconds += (step - before) * mean_seconds
    return (tokens[-1] - tokens[0]) / seconds if seconds else None


def _sizes(sizes: tuple[int, int] | None, each: str = "") -> str:
    """Return a phrase such as `72 KiB a token; 144 KiB in BF16`.

    `sizes` are the bytes in BF16 and in the engine. `each` follows the engine's size: ` a token` in this example.
    """
    if not sizes:
        return ""
    in_bf16, in_engine = map(format_bytes, sizes)
    text = f"{in_engine}{each}"
    return text if in_bf16 == in_engine else f"{text}; {in_bf16} in BF16"
