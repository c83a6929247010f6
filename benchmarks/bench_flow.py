"""What one forward costs a step of the addition demo: pairs of short runs that differ in fp8_forward alone.

    python -m benchmarks.bench_flow [--pairs 4] [--steps 12]

The two of a pair run one after the other, in turns the one and the other first, each in its own process, with the same
seed. `step_seconds_ratio` is that of their median steps, "full" over "off". Times themselves are those of the host.
"""

import argparse
import tempfile
from pathlib import Path

from testing import record

from .bench_demo import run_demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(given.pairs):
            row = {}
            for forward in ("off", "full")[:: 1 if pair % 2 else -1]:
                words = ["--fp8_forward", forward, "--max_steps", given.steps, "--seed", pair]
                row[forward] = run_demo(Path(scratch) / f"{forward}-{pair}", words)
            rows.append(row)
    results = {"step_seconds_ratio": record.spread([_seconds(row["full"]) / _seconds(row["off"]) for row in rows])}
    for forward in ("off", "full"):
        results[forward] = {
            "step_seconds": record.spread([_seconds(row[forward]) for row in rows]),
            "mismatch_mean": record.spread([row[forward]["mismatch_mean"] for row in rows]),
        }
    print(record.write("flow", given.pairs, results).read_text())


def _seconds(summary: dict) -> float:
    return summary["step_seconds_median"]


if __name__ == "__main__":
    main()
