"""The runs that have been made, as one compressed table: a line of JSON a run, sorted by arm and seed.

    zcat benchmarks/claims/runs_cpu.jsonl.gz | grep -m1 '"python -m benchmarks.claims NAME"' | python -m json.tool

shows the run of the cell NAME. The same runs make the same bytes.
"""

import fcntl
import gzip
import json
import os
from pathlib import Path

from testing import record

from .grid import Cell


def path() -> Path:
    """Of the table of this kind of host: a GPU's runs are not mixed with a CPU's."""
    return record.path("runs", Path(__file__).parent).with_suffix(".jsonl.gz")


def cell_of(run: dict) -> Cell:
    """The cell of a run, with the flags' values as they are called now."""
    cell = run["results"]["cell"]
    if cell["flags"].get("fp8_forward") == "full":
        cell = cell | {"flags": cell["flags"] | {"fp8_forward": "one_forward"}}
    return Cell(**cell)


def read(table: Path) -> list[dict]:
    """All runs of a table, none if it does not exist."""
    return list(map(json.loads, gzip.decompress(table.read_bytes()).splitlines())) if table.exists() else []


def add(run: dict, table: Path) -> None:
    """Add a run, in the place of an earlier one of its cell. Whoever is ended in here leaves the table as it was."""
    folder = os.open(table.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # cells run beside each other, and each adds its own run
        by_name = {cell_of(each).name: each for each in (*read(table), run)}
        write(list(by_name.values()), table)
    finally:
        os.close(folder)


def write(runs: list[dict], table: Path) -> None:
    """Write a table beside its place, and move it there: it is whole at any time."""
    ordered = sorted(runs, key=lambda run: (cell_of(run).arm, cell_of(run).seed))
    lines = "".join(json.dumps(run) + "\n" for run in ordered)
    unfinished = table.with_name(f".{table.name}")
    unfinished.write_bytes(
        gzip.compress(lines.encode(), mtime=0)
    )  # without the time, which would be another each time
    unfinished.replace(table)
