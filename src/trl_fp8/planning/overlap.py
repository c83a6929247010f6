"""Gain of rollouts that overlap with training: seconds of a step, from seconds of the step's parts.

`benchmarks/bench_overlap.py` simulates where this formula holds: if all completions have one length, and the bound on
staleness is at least 1. If lengths have a long tail, the gain is larger, because the next rollouts also fill the slots
that the tail leaves empty.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of a step. The server generates nothing during `pause`, by default the whole sync."""

    rollout: float
    train: float
    sync: float = 0.0
    pause: float | None = None

    @property
    def synchronous(self) -> float:
        """Return the seconds of a step whose parts follow each other."""
        return self.rollout + self.train + self.sync

    @property
    def asynchronous(self) -> float:
        """Return the seconds of a step if server and trainer work at the same time."""
        pause = self.sync if self.pause is None else self.pause
        return max(self.rollout + pause, self.train + self.sync)

    @property
    def speedup(self) -> float:
        return self.synchronous / self.asynchronous
