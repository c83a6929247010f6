"""Every benchmark that a GPU is for, one after the other, and the table of their results.

    python -m benchmarks.run_all [--only rollout sync] [--size qwen3_8b qwen3_1_7b] [--results DIR]

Each is a process of its own with its own budget of seconds (about 45 minutes in all on an H200), keeps what it
measured up to then, and is followed by the next one also if it fails. Without a GPU: size "tiny", results in
outputs/benchmarks, which shows that everything starts and says nothing about speed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from testing import record

from . import harness, shapes, table


WITHOUT_SIZE = {"depth": "measure_depth", "lora": "bench_lora"}  # with sizes of their own, and results for CPU
# In order of value, if time is short. Name -> sizes of published models
BENCHMARKS = {
    "rollout": ("qwen3_8b",),
    "sync": ("qwen3_8b",),
    "calibration": ("qwen3_8b",),
    "depth": (None,),
    "lora": (None,),
    "fp8_linear": ("qwen3_8b",),
    "step": ("qwen3_1_7b", "qwen3_8b"),
}


def commands(options: argparse.Namespace) -> list[list[str]]:
    """The command of each benchmark and size that was asked for."""
    found = []
    for name in options.only:
        if name in WITHOUT_SIZE:
            if shapes.DEVICE == "cuda" and options.results is None:
                found.append([sys.executable, "-m", f"benchmarks.{WITHOUT_SIZE[name]}"])
            continue
        sizes = BENCHMARKS[name] if shapes.DEVICE == "cuda" else ("tiny",)
        for size in sizes if options.size is None else [size for size in options.size if size in (*sizes, "tiny")]:
            command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--size", size]
            command += ["--budget", str(options.budget)] if options.budget else []
            found.append(command + (["--results", str(options.results)] if options.results else []))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--size", nargs="+", choices=shapes.SIZES)
    parser.add_argument("--budget", type=float, help="seconds for each benchmark; not set: its own default")
    parser.add_argument("--results", type=Path, help="folder of the result files; see benchmarks.bench_rollout --help")
    options = parser.parse_args()
    chosen, failed = commands(options), []
    if not chosen:
        raise SystemExit(
            f"--only {' '.join(options.only)} --size {options.size} on {shapes.DEVICE} chooses no benchmark: "
            f"published sizes, {' and '.join(WITHOUT_SIZE)} need a GPU, those two a folder of their own "
            f"(no --results), and sizes are {BENCHMARKS}."
        )
    for command in chosen:
        words = " ".join(command[1:])
        print(f"==== {words}", flush=True)
        start = time.monotonic()
        code = subprocess.run(command).returncode
        print(f"==== exit code {code} after {time.monotonic() - start:.0f} s: {words}", flush=True)
        failed += [words] if code else []
    folder = options.results or (record.RESULTS if shapes.DEVICE == "cuda" else harness.SCRATCH)
    print("\n".join(table.render(folder)))
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
