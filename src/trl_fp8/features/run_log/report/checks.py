"""Checks of a run: the questions that a report answers first."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

from trl_fp8.features import registrations
from trl_fp8.features.run_log.log_file import LAST, Run, ends, series

from .results import duration, mismatch_key


@dataclass(frozen=True)
class Check:
    """A question about a run, with its answer. `fine` is False if the reader should look at it."""

    fine: bool
    question: str
    answer: str


def checks(run: Run) -> list[Check]:
    """Return the checks that the run's file has data for."""
    return [*_delivered(run), *_mismatch(run), *_healthy(run), *_saturated(run), *_dead(run), *_sync_share(run)]


def _delivered(run: Run) -> Iterator[Check]:
    audited = _logged(run, "fp8/audited_tensors")
    if audited:
        fewest = int(min(audited))
        answer = (
            f"After each of {len(audited):,} logged syncs, {fewest:,} tensors were read back from the engine and "
            "compared with the policy (the audit). A difference would have stopped the run."
        )
        yield Check(fewest > 0, "Did the engine get the weights?", answer)


def _mismatch(run: Run) -> Iterator[Check]:
    key = mismatch_key(run)
    if key is not None:
        first, last = ends(run.logs, key)
        grows = False
        if first is not None and len(_logged(run, key)) >= 2 * LAST:
            grows = last.mean > 2 * first.mean
        answer = "For the same token their log-probs differ by "
        if first:
            answer += f"{first.mean:.3g} nats on average in {first.steps}, and by "
        answer += f"{last.mean:.3g} nats in {last.steps}."
        if grows:
            answer += " It more than doubled."
        explained = _logged(run, "mismatch/explained_k3")
        unexplained = _logged(run, "mismatch/unexplained_k3")
        if explained and unexplained:
            answer += f" The FP8 formats explain a k3 of {explained[-1]:.3g}; {unexplained[-1]:.3g} is unexplained."
        yield Check(not grows, "How far apart are engine and trainer?", answer)


def _healthy(run: Run) -> Iterator[Check]:
    keys = {key for row in run.logs for key in row if key.startswith(("mismatch/", "correction/"))}
    logged = {key: _logged(run, key) for key in keys}
    means = {key: fmean(values[-LAST:]) for key, values in logged.items() if values}
    if means:
        warnings = {}
        for registration in registrations():
            warnings |= registration.warnings(means, run.facts)
        steps = min(LAST, max(map(len, logged.values())))
        over = f"Over the last {steps} logged steps" if steps > 1 else "In the one logged step"
        answer = f"{over} all its metrics are within the thresholds of the warnings."
        if warnings:
            answer = " ".join(warnings.values())
        yield Check(not warnings, "Is the mismatch small enough to correct?", answer)


def _saturated(run: Run) -> Iterator[Check]:
    shares = _logged(run, "fp8/kv_saturation_fraction")
    if shares:
        most = max(shares)
        answer = "No cached key or value was larger than its FP8 scale allows."
        if most:
            answer = (
                f"In the worst step {100 * most:.2g}% of the cached keys and values were larger than their FP8 scale "
                "allows, and were clipped to it."
            )
        yield Check(most < 1e-3, "Did the KV cache hold its values?", answer)


def _dead(run: Run) -> Iterator[Check]:
    blocks = _logged(run, "fp8/dead_blocks")
    if blocks:
        most = int(max(blocks))
        count = {0: "No block", 1: "One block"}.get(most, f"{most:,} blocks")
        yield Check(not most, "Are all weights alive?", f"{count} of weights had become as good as zero.")


def _sync_share(run: Run) -> Iterator[Check]:
    step_times = _logged(run, "step_time")
    sync_times = _logged(run, "fp8/sync_seconds")
    if step_times and sync_times:
        step = median(step_times)
        sync = median(sync_times)
        calibration = _logged(run, "fp8/calibration_seconds")
        answer = f"Sending the weights (the sync) takes {duration(sync)}, {sync / step:.1%} of a step"
        if calibration:
            answer += f", {duration(median(calibration))} of it for the scales of the KV cache"
        pauses = _logged(run, "fp8/pause_seconds")
        if pauses:
            answer += f", and pauses the server for {duration(median(pauses))}"
        yield Check(sync < 0.5 * step, "Is the sync cheap?", f"{answer} (medians).")


def _logged(run: Run, key: str) -> list[float]:
    _, values = series(run.logs, key)
    return values
