"""The first experiments on a Hopper GPU in the order of what they decide, each with its own time limit.

    python -m gpu.ten_minutes --results DIR                        the first three: 510 seconds at most
    python -m gpu.ten_minutes --results DIR --only depth parts syncs   these, in this order

    decode  240 s   8B shapes in 8 layers, compiled, 64 sequences of 1k and 2 of 16k tokens: BF16, FP8 on DeepGEMM and
                    on CUTLASS
    sync     75 s   a timed sync
    kernels  60 s   no engine: this project's kernels against torch's, each FP8 GEMM's check, microseconds of a call
    depth   150 s   mismatch of one forward over 36 random layers, compiled: 1e-6 is expected. If it is more, once more
                    without the compiler
    parts   120 s   tests/features/one_forward/test_gpu_parts.py: which part of one forward gives a row other bits in
                    another batch
    syncs   120 s   tiny engines with graphs and one compile cache: sleep beside a shared base, two syncs, adapters

Each experiment has a file DIR/first_NAME_gpu.json, written before it begins, after each row and at its end. A failure
is a result: the file has the exit code and the end of the log under "error", and the next experiment begins. What a
benchmark writes by itself stands in DIR, too. With --archive FILE everything in DIR is packed into one file after each
experiment: a host may send back few files.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from testing import record


LIMIT = 510  # seconds; a lease's commands may take 600, and the machine's start and the way back are part of them
LEAST = 10  # with less time nothing is begun
GRACE = 5  # in which an ended process may end what it has started
SHOWN = 60  # lines of the log of what failed
TEST = re.compile(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")  # of `pytest -v`
EXACT = 1e-5  # mean |trainer - rollout| log-prob below which one forward is one, log-softmax aside


def pytest(*words: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-m", "gpu", "-v", "--timeout", "100", "-p", "no:cacheprovider", *words)


def is_exact(rows: list[dict]) -> bool:
    return bool(rows) and rows[-1]["mismatch_mean"] < EXACT


@dataclass(frozen=True)
class Experiment:
    """Commands of Python, one after another until `enough` says that its rows will do, within `seconds`.

    Attributes:
        caches: Its processes share one cache of vLLM's compiler, empty at first.
    """

    name: str
    seconds: float
    commands: tuple[tuple[str, ...], ...]
    enough: Callable[[list[dict]], bool] = lambda rows: False
    caches: bool = False


DEPTH = ("-m", "benchmarks.measure_depth", "--cell", "random 36 full", "--seeds", "1")
SYNCS = tuple(
    f"tests/engine/test_gpu.py::{name}"
    for name in (
        "test_an_engine_with_a_shared_base_sleeps_and_samples_again",  # crashed once, in a version before this one
        "test_two_syncs_equal_fresh_engines[cutlass]",
        "test_a_compiled_engine_computes_what_an_eager_one_does_with_any_adapters[4]",
    )
)
# Eight layers: engines of 36 would take the time to start. The compiler stays on, because without it FP8 pays for
# quantization kernels that it would fuse; graphs of these two batches alone are captured
QUICK = '{"compilation_config": {"cudagraph_capture_sizes": [2, 64]}}'
DECODE = ("-m", "benchmarks.bench_rollout", "--size", "qwen3_8b", "--layers", "8", "--engine-kwargs", QUICK)
DECODE += ("--lengths", "1024", "16384", "--sequences", "64", "2", "--most", "64", "--slice", "32", "--repeats", "2")
DECODE += ("--budget", "230", "--utilization", "0.6")
DECODE += ("--precisions", "bf16", "fp8_linears_kv_deep_gemm", "fp8_linears_kv_cutlass")
SYNC = ("-m", "benchmarks.bench_sync", "--size", "qwen3_1_7b", "--dtype", "bfloat16", "--rounds", "1", "--syncs", "2")
EXPERIMENTS = (
    Experiment("decode", 240, (DECODE,)),
    Experiment("sync", 75, ((*SYNC, "--budget", "70"),)),
    Experiment("kernels", 60, (("-m", "benchmarks.bench_kernels"),)),
    Experiment("depth", 150, (DEPTH, (*DEPTH, "--engine-kwargs", '{"enforce_eager": true}')), is_exact),
    Experiment("parts", 120, (pytest("tests/features/one_forward/test_gpu_parts.py"),)),
    Experiment("syncs", 120, (pytest(*SYNCS),), caches=True),
)
FIRST = ("decode", "sync", "kernels")  # what is run if nothing else is named


def run(experiment: Experiment, folder: Path, seconds: float) -> bool:
    """Run an experiment and write its file. Return whether all needed commands succeeded within `seconds`."""
    with tempfile.TemporaryDirectory(prefix="trl-fp8-cache-") as cache:
        caches = {"VLLM_CACHE_ROOT": cache} if experiment.caches else {}  # not in `folder`, whose files are sent back
        return _run(experiment, folder, seconds, os.environ | {"PYTHONUNBUFFERED": "1"} | caches)


def _run(experiment: Experiment, folder: Path, seconds: float, environment: dict[str, str]) -> bool:
    results = {"limit": seconds, "runs": []}
    ends = time.monotonic() + seconds
    save(experiment, results, folder)
    for words in experiment.commands:
        if results["runs"] and experiment.enough(results["runs"][-1]["rows"]):
            break
        words = [*words, *(["--results", str(folder)] if "--size" in words else [])]
        made = {"command": shlex.join(["python", *words]), "rows": [], "exit_code": None}
        results["runs"].append(made)
        lines, began = deque(maxlen=SHOWN), time.monotonic()
        for line in output([sys.executable, *words], environment, folder / f"first_{experiment.name}.log", ends, made):
            if line.startswith(harness.ROW):
                made["rows"].append(json.loads(line.removeprefix(harness.ROW)))
                save(experiment, results, folder)
            else:
                print(line, flush=True)
                lines.append(line)
            if found := TEST.match(line):
                made["rows"].append({"test": found[1], "outcome": found[2]})
                save(experiment, results, folder)
        made["seconds"] = time.monotonic() - began
        if made["exit_code"] != 0:
            made["error"] = "\n".join(lines)
        save(experiment, results, folder)
    return all(made["exit_code"] == 0 for made in results["runs"])


def output(command: list[str], environment: dict[str, str], log: Path, ends: float, made: dict) -> Iterator[str]:
    """Lines of a command as they come, through a file: of a pipe, what the command has started could hold the end
    open. Notes the exit code, or "time" if it had to be ended.
    """
    with log.open("a") as written, log.open() as read:
        read.seek(0, os.SEEK_END)
        options = {"stdout": written, "stderr": subprocess.STDOUT, "start_new_session": True, "env": environment}
        process = subprocess.Popen(command, **options)
        try:
            left, running = "", True
            while running:
                running = process.poll() is None and time.monotonic() < ends
                *whole, left = (left + read.read()).split("\n")
                yield from whole
                if running:
                    time.sleep(0.1)
            yield from [left] if left else []
            made["exit_code"] = "time" if process.poll() is None else process.returncode
        finally:
            end(process)


def save(experiment: Experiment, results: dict, folder: Path) -> None:
    record.write(f"first_{experiment.name}", max(1, len(results["runs"])), results, folder)


def pack(folder: Path, archive: Path) -> None:
    """Pack the files of a folder into one archive, in the place of an earlier one."""
    unfinished = archive.with_name(f"{archive.name}.unfinished")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(unfinished, "w:gz") as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file not in (archive, unfinished):
                packed.add(file, file.relative_to(folder))
    unfinished.replace(archive)


def end(process: subprocess.Popen) -> None:
    """End a process and what it has started: a benchmark ends its parts, which are in sessions of their own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(experiments: tuple[Experiment, ...] = EXPERIMENTS) -> int:
    named = {each.name: each for each in experiments}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of the files")
    first = [name for name in named if name in FIRST] or list(named)
    parser.add_argument("--only", nargs="+", choices=named, default=first, help="these, in this order")
    parser.add_argument("--archive", type=Path, help="file that everything is packed into after each experiment")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of all of them together")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside; what was measured is in the files"))
    ends, failed = time.monotonic() + options.limit, []
    steps = ", ".join(f"{name} {named[name].seconds:g} s" for name in options.only)
    print(f"==== {steps}; at most {options.limit:g} s together", flush=True)
    for name in options.only:
        experiment, left = named[name], ends - time.monotonic()
        if left < min(LEAST, experiment.seconds):
            save(experiment, {"limit": left, "runs": [], "error": "not begun, no time left"}, options.results)
            failed.append(name)
            continue
        print(f"==== {name} (at most {min(left, experiment.seconds):.0f} s)", flush=True)
        went_well = run(experiment, options.results, min(left, experiment.seconds))
        print(f"==== {name}: {'done' if went_well else 'FAILED'}", flush=True)
        failed += [] if went_well else [name]
        if options.archive:
            pack(options.results, options.archive)
    if failed:
        print(f"==== failed: {' '.join(failed)}; see first_*.json in {options.results}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
