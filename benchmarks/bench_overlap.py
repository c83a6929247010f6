"""What asynchronous rollouts buy, simulated with the parameters below, and one small case measured.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_overlap [--seeds 3] [--measure]

A server decodes SLOTS sequences at a time; with c of them a token takes (1 + load * c / SLOTS) units. Lengths of
completions are log-normal around TOKENS, cut at LONGEST times that; `tail` is their sigma, and 0 gives all the same
length. A step trains on SLOTS completions. Synchronous, it samples them, trains, and syncs. Asynchronous, it does as
TRL 1.16: requests of up to `staleness` steps are under way, a group of completions has the version of its first
request and is finished with its last, and one older than `staleness` is dropped when the trainer takes it. The server
waits during the pause of a sync, and then computes the tokens in flight once more, PREFILL in the time that one
sequence alone takes for a token.

Times are in units of the mean synchronous rollout of the same lengths, and `ratio` is rollout over training. What
the simulation leaves out: rewards, prompts, and all contention between trainer and server.

With `--measure`, a synchronous and an asynchronous run are timed against a vLLM server on this host, whose decoding
steps and whose trainer's steps sleep for a set time. So their ratio depends little on the load of the host.
"""

import argparse
import heapq
import os
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

import numpy as np
from transformers import TrainerCallback

from testing import record
from trl_fp8.planning.overlap import StepTimes


SLOTS = 64  # sequences that the server decodes at a time, and completions of a step
GROUP = 8  # completions of a prompt
TOKENS, LONGEST = 1000, 8  # median length, and the longest over it
PREFILL = 500  # tokens that are computed again in one unit
SYNC, PAUSE = 0.05, 0.02  # over the mean synchronous rollout
STEPS, WARM_UP = 60, 20  # simulated steps, of which the first are left out
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
STALENESS = (1, 2, 4, 8)
TAILS = (0.0, 1.0)
LOADS = (0.0, 1.0)
MEASURED = {"decode": 0.5, "train": 4.0, "steps": 8}  # seconds of a decoded token, of training a step; steps


@dataclass(frozen=True)
class Case:
    """Parameters of a simulation; times in units of a decoded token of one sequence."""

    train: float
    sync: float
    pause: float
    staleness: int
    load: float = 0.0
    slots: int = SLOTS
    prefill: float = PREFILL
    queue: int = 1024  # TRL's bound on finished completions

    def token_time(self, sequences: int) -> float:
        return 1 + self.load * sequences / self.slots


@dataclass
class Server:
    """Sequences that are decoded together. `clock` counts the tokens that each has got, `now` the time."""

    case: Case
    now: float = 0.0
    clock: float = 0.0

    def __post_init__(self):
        self.active: list[tuple[float, float, int]] = []  # (clock at its end, clock at its start, group)

    def begin(self, length: float, group: int) -> None:
        heapq.heappush(self.active, (self.clock + length, self.clock, group))

    def advance(self, end: float) -> int | None:
        """Decode until `end`, or until a sequence has ended: return its group then."""
        if self.active:
            token_time = self.case.token_time(len(self.active))
            finished = self.now + (self.active[0][0] - self.clock) * token_time
            if finished <= end:
                self.now = finished
                self.clock, _, group = heapq.heappop(self.active)
                return group
            self.clock += (end - self.now) / token_time
        self.now = end
        return None

    def pause(self, seconds: float) -> None:
        """Wait, and compute the caches of the sequences in flight once more."""
        in_flight = sum(self.clock - first for _, first, _ in self.active)
        self.now += seconds + in_flight / self.case.prefill


def rollout_time(case: Case, lengths: np.ndarray) -> float:
    """Return the time of one synchronous rollout of these lengths."""
    server = Server(case)
    for length in lengths:
        server.begin(float(length), 0)
    while server.active:
        server.advance(float("inf"))
    return server.now


@dataclass
class Group:
    """Completions of one prompt: version at its first request, mean length, number that is not finished."""

    version: int
    length: float
    unfinished: int


def asynchronous(case: Case, lengths: np.ndarray, steps: int = STEPS, warm_up: int = WARM_UP) -> dict:
    """Return mean time of a step, mean age of a rollout, share of dropped ones, and length of trained over all.

    `lengths`: `[groups, completions]`.
    """
    server = Server(case)
    groups: list[Group] = []  # in the order of their requests
    waiting: deque[tuple[float, int]] = deque()  # (length, group) of requests that the server has no slot for
    finished: deque[int] = deque()  # groups that no step has taken
    in_step, size = case.slots // lengths.shape[1], lengths.shape[1]
    version, now = 0, 0.0  # the trainer's time
    times, trained, dropped = [], [], []

    def decode(until: float) -> None:
        while len(server.active) + len(waiting) < case.staleness * case.slots and len(finished) < case.queue // size:
            own = lengths[len(groups)]
            waiting.extend((float(length), len(groups)) for length in own)
            groups.append(Group(version, float(own.mean()), size))
        while waiting and len(server.active) < case.slots:
            server.begin(*waiting.popleft())
        group = server.advance(until)
        if group is not None:
            groups[group].unfinished -= 1
            if not groups[group].unfinished:
                finished.append(group)

    for step in range(steps):
        batch: list[Group] = []
        while len(batch) < in_step:
            if not finished:
                decode(float("inf"))
                now = max(now, server.now)
                continue
            group = groups[finished.popleft()]
            if version - group.version > case.staleness:
                dropped.append(group)
            else:
                batch.append(group)
        trained += [(version - group.version, group.length) for group in batch if step >= warm_up]
        now += case.train + case.sync
        while server.now < now - case.pause:
            decode(now - case.pause)
        server.pause(case.pause)
        version += 1
        times.append(now)
    taken = in_step * steps + len(dropped)
    return {
        "step": (times[-1] - times[warm_up - 1]) / (steps - warm_up),
        "age": fmean(age for age, _ in trained),
        "dropped": len(dropped) / taken,
        "trained_length": fmean(length for _, length in trained) / float(lengths.mean()),
    }


def sampled_lengths(tail: float, count: int, seed: int) -> np.ndarray:
    draws = np.random.default_rng(seed).normal(0.0, 1.0, count)
    return np.minimum(np.round(TOKENS * np.exp(tail * draws)), LONGEST * TOKENS)


def simulated(ratio: float, staleness: int, tail: float, load: float, seed: int) -> dict:
    """Return the gain of one case in simulation and by the formula, with what staleness costs."""
    lengths = sampled_lengths(tail, 16 * STEPS * SLOTS, seed)
    case = Case(train=0.0, sync=0.0, pause=0.0, staleness=staleness, load=load)
    rollout = fmean(rollout_time(case, batch) for batch in lengths.reshape(-1, SLOTS)[:40])
    case = replace(case, train=rollout / ratio, sync=SYNC * rollout, pause=PAUSE * rollout)
    found = asynchronous(case, lengths.reshape(-1, GROUP))
    recomputed = SLOTS * float(lengths.mean()) / 2 / PREFILL  # tokens of completions that are half done
    times = StepTimes(rollout, case.train, case.sync, case.pause + recomputed)
    return {
        "speedup": times.synchronous / found["step"],
        "speedup_by_formula": times.speedup,
        "age": found["age"],
        "dropped": found["dropped"],
        "trained_length": found["trained_length"],
    }


def slow_decoding() -> None:
    """Let each step of this process's server take `MEASURED["decode"]` seconds longer."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    execute = CPUWorker.execute_model

    def slowed(self, scheduler_output):
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(MEASURED["decode"])
        return execute(self, scheduler_output)

    CPUWorker.execute_model = slowed


class Steps(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.monotonic())


def timed(trainer, steps: Steps) -> list[float]:
    """Train with `MEASURED["train"]` seconds of sleep in each loss. Return the seconds of each step but the first."""
    loss = trainer.compute_loss

    def slowed(*args, **kwargs):
        time.sleep(MEASURED["train"])
        return loss(*args, **kwargs)

    trainer.compute_loss = slowed
    trainer.train()
    return np.diff(steps.ends).tolist()


def measured_case() -> dict:
    """Return seconds of synchronous and asynchronous steps against a server, and what the simulation makes of them."""
    # The simulation needs none of it, and vLLM takes seconds to import
    from testing import forked_server
    from testing.async_rollouts import (
        conversations,
        plain_chat_tokenizer,
        reward_digits_of_chats,
        without_flash_attention,
    )
    from testing.runs import arguments, dataset, reward_digits, rows
    from testing.tiny_models import save_checkpoint
    from trl_fp8 import FP8AsyncGRPOConfig, FP8AsyncGRPOTrainer, FP8GRPOTrainer
    from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN

    slots, size, tokens, count = 8, 4, 8, MEASURED["steps"]
    with (
        tempfile.TemporaryDirectory() as folder,
        forked_server.running(
            str(save_checkpoint(Path(folder, "policy"))),
            Path(folder, "transfer"),
            plant=slow_decoding,
            kv_cache_dtype="fp8",
            max_num_seqs=slots,
        ) as server,
        without_flash_attention(),
    ):
        os.environ |= {FOLDER: server.folder, TOKEN: server.token}
        flags = {"vllm_server_base_url": server.url, "max_steps": count, "bf16": False}
        steps = Steps()
        args = arguments(Path(folder, "sync"), vllm_mode="server", **flags)
        trainer = FP8GRPOTrainer(server.model, reward_digits, args, dataset(), callbacks=[steps])
        generate, rollouts = trainer.vllm_generation.generate, []

        def noted(*args, **kwargs):
            start = time.monotonic()
            answer = generate(*args, **kwargs)
            rollouts.append(time.monotonic() - start)
            return answer

        trainer.vllm_generation.generate = noted
        synchronous = timed(trainer, steps)
        syncs = [row["fp8/sync_seconds"] for row in rows(trainer)]
        steps = Steps()
        flags |= {"max_staleness": 2, "token_budget": -1}
        args = arguments(Path(folder, "async"), FP8AsyncGRPOConfig, **flags)
        trainer = FP8AsyncGRPOTrainer(
            server.model,
            reward_digits_of_chats,
            args,
            train_dataset=conversations(),
            processing_class=plain_chat_tokenizer(),
            callbacks=[steps],
        )
        overlapped = timed(trainer, steps)
        pauses = [row["fp8/pause_seconds"] for row in rows(trainer)]
    rollout, sync, pause = median(rollouts[1:]), median(syncs), median(pauses)
    times = StepTimes(rollout, median(synchronous) - rollout - sync, sync, pause)
    unit = rollout / tokens
    case = Case(times.train / unit, sync / unit, pause / unit, staleness=2, slots=slots, prefill=float("inf"))
    found = asynchronous(case, np.full((40 * count, size), float(tokens)), steps=2 * count, warm_up=count)
    return {
        "case": MEASURED | {"slots": slots, "group": size, "tokens": tokens, "staleness": 2},
        "seconds": {name: getattr(times, name) for name in ("rollout", "train", "sync", "pause")},
        "synchronous_step": record.spread(synchronous[1:]),
        "asynchronous_step": record.spread(overlapped[1:]),
        "speedup": median(synchronous[1:]) / median(overlapped[1:]),
        "speedup_by_formula": times.speedup,
        "speedup_by_simulation": times.synchronous / (found["step"] * unit),
        "age_max": max(row["staleness/age_max"] for row in rows(trainer)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help="time the small case, too: 4 minutes")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result file")
    options = parser.parse_args()
    found = []
    for tail, load, ratio, staleness in product(TAILS, LOADS, RATIOS, STALENESS):
        runs = [simulated(ratio, staleness, tail, load, seed) for seed in range(options.seeds)]
        row = {"tail": tail, "load": load, "ratio": ratio, "staleness": staleness}
        found.append(row | {name: record.spread([run[name] for run in runs]) for name in runs[0]})
    parameters = {"slots": SLOTS, "tokens": TOKENS, "longest": LONGEST, "prefill": PREFILL, "sync": SYNC}
    parameters |= {"pause": PAUSE, "steps": STEPS, "warm_up": WARM_UP}
    results = {"parameters": parameters, "rows": found}
    if options.measure:
        # A process of its own: a server is forked before its trainer starts process groups
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            results["measured"] = process.submit(measured_case).result()
    record.write("overlap", options.seeds, results, options.results)


if __name__ == "__main__":
    main()
