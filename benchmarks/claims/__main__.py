"""Run the grid's cells that are not in the table of runs yet.

    python -m benchmarks.claims [CELL ...] [--workers 2] [--minutes M] [--again]

A CELL is the name of one, or what the names of several begin with; without any, the whole grid in its order. Every
cell is one process, which adds one row to benchmarks/claims/runs_<cpu|gpu>.jsonl.gz. Stop it at any time, and go on
with the same command: what has a row is not run again, except with --again. What a cell prints goes to outputs/claims.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import monotonic

from . import run_table
from .grid import Cell, cells


LOGS = Path("outputs/claims")


def main() -> int:
    parser = argparse.ArgumentParser(description="What FP8 does to learning: the grid of training runs.")
    parser.add_argument("cells", nargs="*", metavar="CELL", help="Names of cells, or their beginnings.")
    parser.add_argument("--workers", type=int, default=2, help="Cells at a time, one thread each.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Start none after so long.")
    parser.add_argument("--again", action="store_true", help="Run also cells that have a row, and replace it.")
    given = parser.parse_args()
    wanted = [cell for cell in cells() if not given.cells or cell.name.startswith(tuple(given.cells))]
    if not wanted:
        parser.error(f"no cell of grid.yaml begins with {' or '.join(given.cells)}")
    done = set() if given.again else {run_table.cell_of(run).name for run in run_table.read(run_table.path())}
    todo = [cell for cell in wanted if cell.name not in done]
    print(f"{len(wanted)} cells, {len(wanted) - len(todo)} of them done; each takes one to four minutes", flush=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    LOGS.mkdir(parents=True, exist_ok=True)
    context = get_context("forkserver")  # imports torch, TRL and vLLM once for all cells
    context.set_forkserver_preload([f"{__package__}.cell"])
    until = monotonic() + 60 * given.minutes

    from .cell import run_logged  # brings torch, TRL and vLLM along

    def run(cell: Cell) -> bool:
        if monotonic() > until:
            return True
        began = monotonic()
        process = context.Process(target=run_logged, args=(cell, LOGS / f"{cell.name}.log"))
        process.start()
        process.join()
        state = "done" if process.exitcode == 0 else f"FAILED, see {LOGS / cell.name}.log"
        print(f"{cell.name}: {state}, {monotonic() - began:.0f} s", flush=True)
        return process.exitcode == 0

    with ThreadPoolExecutor(given.workers) as pool:
        return 0 if all(list(pool.map(run, todo))) else 1


if __name__ == "__main__":
    sys.exit(main())
