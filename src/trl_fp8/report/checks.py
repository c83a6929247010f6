"""Whether a run did what it was meant to do: the few questions that a report answers first."""

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
    return [check for ask in (_delivered, _mismatch, _healthy, _saturated, _dead, _sync_share) if (check := ask(run))]


def _delivered(run: Run) -> Check | None:
    if not (audited := _logged(run, "fp8/audited_tensors")):
        return None
    fewest = int(min(audited))
    answer = f"{len(audited)} logged syncs, each read back from the engine ({fewest:,} tensors); "
    answer += "a difference would have stopped the run"
    return Check(fewest > 0, "Did the engine get the weights?", answer)


def _mismatch(run: Run) -> Check | None:
    if not (values := mismatches(run)):
        return None
    first, last = fmean(values[:LAST]), fmean(values[-LAST:])
    grows = len(values) >= 2 * LAST and last > 2 * first
    answer = f"mean |log-prob difference| {first:.3g} nats at the start, {last:.3g} at the end"
    return Check(not grows, "How far are engine and trainer apart?", answer + (": it doubled" if grows else ""))


def _healthy(run: Run) -> Check | None:
    keys = {key for row in run.logs for key in row if key.startswith(("mismatch/", "correction/"))}
    found = {key: fmean(values[-LAST:]) for key in keys if (values := _logged(run, key))}
    if not found:
        return None
    level = (run.facts["correction"] or {}).get("level")
    warnings = health_warnings(found, RolloutCorrection(level=level))
    fine = f"all metrics of the last {LAST} logged steps are where others trained stably"
    return Check(not warnings, "Can the correction handle it?", " ".join(warnings.values()) or fine)


def _saturated(run: Run) -> Check | None:
    if not (shares := _logged(run, "fp8/kv_saturation_fraction")):
        return None
    answer = f"at most {max(shares):.2g} of the elements of k and v were beyond their scale"
    return Check(max(shares) < 1e-3, "Did the KV cache hold its values?", answer)


def _dead(run: Run) -> Check | None:
    if not (blocks := _logged(run, "fp8/dead_blocks")):
        return None
    most = ceil(max(blocks))  # of means over steps
    answer = f"{most:,} blocks of weights were as good as zero" if most else "no block of weights is dead"
    return Check(not most, "Are all weights alive?", answer)


def _sync_share(run: Run) -> Check | None:
    steps, syncs = _logged(run, "step_time"), _logged(run, "fp8/sync_seconds")
    if not (steps and syncs):
        return None
    calibration = _logged(run, "fp8/calibration_seconds")
    answer = f"sync {median(syncs) / median(steps):.1%} of a step of {median(steps):.3g} s"
    answer += f", calibration of the KV cache {median(calibration) / median(steps):.2%}" if calibration else ""
    return Check(median(syncs) < 0.5 * median(steps), "What does it cost?", answer)


def _logged(run: Run, key: str) -> list[float]:
    return [row[key] for row in run.logs if key in row and isfinite(row[key])]
