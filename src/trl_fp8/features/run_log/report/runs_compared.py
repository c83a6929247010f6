"""Several runs side by side: their results, and the settings in which they differ."""

from collections.abc import Iterator, Sequence
from typing import Any

from trl_fp8.features.run_log.log_file import Run

from .results import Result, correction_name, model_name, results


PLACES = ("output_dir", "run_name")  # flags that differ because the runs do


def compared(runs: Sequence[Run]) -> Iterator[list[Result | None]]:
    """A row of results: one for each run, None where it was not measured."""
    found = [{result.label: result for result in results(run)} for run in runs]
    for label in dict.fromkeys(label for each in found for label in each):
        yield [each.get(label) for each in found]


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings that are not the same in all of `runs` -> their values. A flag that was not given is `default`."""
    settings = [_settings(run) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each if name not in PLACES)
    rows = {name: [str(each.get(name, "default")) for each in settings] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _settings(run: Run) -> dict[str, Any]:
    facts = run.facts
    shown = {
        "correction of the loss": correction_name(facts),
        "model": model_name(facts),
        "processes": facts["processes"],
        "hardware": facts["hardware"],
    }
    return shown | facts.get("fp8_flags", {}) | facts["flags"]
