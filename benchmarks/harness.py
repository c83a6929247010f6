"""How a benchmark of one size runs: its options, its time limit, a process for each part,
a result file after each row.

A part (an engine, mostly) runs as `python -m benchmarks.bench_NAME ... --part PART` in a process of its own and prints
its rows; the parent keeps every row that arrived, whatever becomes of the process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from testing import record

from . import shapes


ROW = "ROW "
SCRATCH = Path(__file__).parents[1] / "outputs" / "benchmarks"


def parser(description: str, budget: int, engine: bool = True) -> argparse.ArgumentParser:
    """The options that all benchmarks of a size share;
    without `engine` there are no parts and nothing to tell vLLM.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", choices=shapes.SIZES, default="qwen3_8b" if shapes.DEVICE == "cuda" else "tiny")
    made.add_argument("--budget", type=float, default=budget, help="seconds after which nothing new is begun")
    made.add_argument(
        "--results",
        type=Path,
        help="folder of the result file; by default benchmarks/results for a published model's size on a GPU, else "
        "outputs/benchmarks",
    )
    made.set_defaults(engine_kwargs={}, part=None)
    if engine:
        made.add_argument("--engine-kwargs", type=shapes.kwargs_from, help="of vllm.LLM, as a JSON object")
        made.add_argument("--part", help="measure this part only and print its rows; used by the benchmark itself")
    return made


def emit(row: dict) -> None:
    """Hand one row to the parent process."""
    print(ROW + json.dumps(row), flush=True)


def skip(what: str, why: str = "did not fit into the budget") -> None:
    """Tell the parent process that a row will not come."""
    emit({"not_measured": {what: why}})


def _end(process: subprocess.Popen) -> None:
    """End what is left of a part: itself, or what it has started
    (compile workers, which could hold its output open).
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Run:
    """One run of a benchmark, with a result file that is written again after each row.

    Attributes:
        results: What the file holds under "results". "not_measured" says of each part that failed, or did not fit into
            the budget, why.
    """

    def __init__(self, name: str, options: argparse.Namespace, n: int = 1, **results):
        self.name, self.options, self.n = f"{name}_{options.size}", options, n
        if layers := getattr(options, "layers", None):  # a part of the model is no result of the model
            self.name += f"_{layers}_layers"
        self.deadline = time.monotonic() + options.budget
        published = shapes.DEVICE == "cuda" and options.size != "tiny"
        self.folder = options.results or (record.RESULTS if published else SCRATCH)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = {"size": options.size, "engine_kwargs": options.engine_kwargs, **results, "not_measured": {}}
        self.failed = False
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside; what was measured is in the file"))

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - time.monotonic()

    def save(self) -> Path:
        return record.write(self.name, self.n, self.results, self.folder)

    def rows(self, part: str, parts_left: int = 1) -> Iterator[dict]:
        """Rows of a part, which gets its share of what is left of the budget."""
        if self.left <= 0:
            self.results["not_measured"][part] = "did not fit into the budget"
            return
        seconds = self.left / parts_left
        # Of two --budget the last one counts. A part stops by itself in time, if its engine starts;
        # it may be late by this
        limit = max(1.25 * seconds, min(seconds + 60, self.left))
        command = [sys.executable, *sys.orig_argv[1:], "--part", part, "--budget", str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        late = threading.Event()
        timer = threading.Timer(limit, lambda: (late.set(), _end(process)))
        timer.start()
        try:
            yield from self._read(part, process.stdout)
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
        if late.is_set():
            self.failed = True
            self.results["not_measured"][part] = f"ended after {limit:.0f} seconds; rows from before are kept"
        elif code:
            self.failed = True
            self.results["not_measured"][part] = f"its process failed with exit code {code}; see the log"
        self.save()

    def _read(self, part: str, lines: Iterable[str]) -> Iterator[dict]:
        for line in lines:
            if not line.startswith(ROW):
                print(line, end="", flush=True)
                continue
            row = json.loads(line.removeprefix(ROW))
            if "not_measured" in row:
                self.results["not_measured"] |= {f"{part}, {what}": why for what, why in row["not_measured"].items()}
            else:
                yield row
            self.save()

    def finish(self) -> None:
        """Write the file, print it, and fail if a part did, or had to be ended."""
        path = self.save()
        print(path.read_text())
        print(f"written: {path}")
        if self.failed:
            raise SystemExit(f"{self.name}: {self.results['not_measured']}")


def ratios(over: list[float], under: list[float]) -> dict[str, float]:
    """Spread of the ratios, repeat by repeat."""
    return record.spread([a / b for a, b in zip(over, under, strict=True)])
