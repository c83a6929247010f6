"""Whether a run did what it was meant to do: the few questions that a report answers first."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, isfinite
from statistics import fmean, median

from trl_fp8.correction.health import health_warnings
from trl_fp8.correction.importance import RolloutCorrection
from trl_fp8.run.file import Run

from .comparison import mismatches


LAST = 10  # logged steps over which a metric is averaged, so that one batch does not decide


@dataclass(frozen=True)
class Check:
    """One answer; `fine` is False where the reader should look."""

    fine: bool
    question: str
    answer: str


def checks(run: Run) -> list[Check]:
    """Checks that the run's file has data for."""
    return [check for ask in (_delivered, _mismatch, _healthy, _saturated, _dead, _sync_share) for check in ask(run)]


def _delivered(run: Run) -> Iterator[Check]:
    if audited := _logged(run, "fp8/audited_tensors"):
        fewest = int(min(audited))
        answer = f"{len(audited)} logged syncs, each read back from the engine ({fewest:,} tensors); "
        answer += "a difference would have stopped the run"
        yield Check(fewest > 0, "Did the engine get the weights?", answer)


def _mismatch(run: Run) -> Iterator[Check]:
    if values := mismatches(run):
        first, last = fmean(values[:LAST]), fmean(values[-LAST:])
        grows = len(values) >= 2 * LAST and last > 2 * first
        answer = f"mean |log-prob difference| {first:.3g} nats at the start, {last:.3g} at the end"
        yield Check(not grows, "How far are engine and trainer apart?", answer + (": it doubled" if grows else ""))


def _healthy(run: Run) -> Iterator[Check]:
    keys = {key for row in run.logs for key in row if key.startswith(("mismatch/", "correction/"))}
    if found := {key: fmean(values[-LAST:]) for key in keys if (values := _logged(run, key))}:
        level = (run.facts["correction"] or {}).get("level")
        warnings = health_warnings(found, RolloutCorrection(level=level))
        fine = f"all metrics of the last {LAST} logged steps are where others trained stably"
        yield Check(not warnings, "Can the correction handle it?", " ".join(warnings.values()) or fine)


def _saturated(run: Run) -> Iterator[Check]:
    if shares := _logged(run, "fp8/kv_saturation_fraction"):
        answer = f"at most {max(shares):.2g} of the elements of k and v were beyond their scale"
        yield Check(max(shares) < 1e-3, "Did the KV cache hold its values?", answer)


def _dead(run: Run) -> Iterator[Check]:
    if blocks := _logged(run, "fp8/dead_blocks"):
        most = ceil(max(blocks))  # of means over steps
        answer = f"{most:,} blocks of weights were as good as zero" if most else "no block of weights is dead"
        yield Check(not most, "Are all weights alive?", answer)


def _sync_share(run: Run) -> Iterator[Check]:
    steps, syncs = _logged(run, "step_time"), _logged(run, "fp8/sync_seconds")
    if steps and syncs:
        calibration = _logged(run, "fp8/calibration_seconds")
        answer = f"sync {median(syncs) / median(steps):.1%} of a step of {median(steps):.3g} s"
        answer += f", calibration of the KV cache {median(calibration) / median(steps):.2%}" if calibration else ""
        yield Check(median(syncs) < 0.5 * median(steps), "What does it cost?", answer)


def _logged(run: Run, key: str) -> list[float]:
    return [row[key] for row in run.logs if key in row and isfinite(row[key])]
