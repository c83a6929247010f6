"""A result file that says where its numbers come from: command, commit, versions, hardware, n, and spread."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median, stdev

import torch

from trl_fp8.run.facts import hardware, versions


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
UNKNOWN = "unknown: set TRL_FP8_COMMIT where there is no repository"


def spread(values: list[float]) -> dict[str, float]:
    """Return median, smallest and largest of repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def interval(values: list[float]) -> dict[str, float]:
    """Return the mean of at least two measurements, and the ends of its 95 % interval (Student's t)."""
    from scipy.stats import (
        t,  # a GPU host with the packages of gpu/requirements.txt has no scipy and needs no interval
    )

    mean, half = fmean(values), t.ppf(0.975, len(values) - 1).item() * stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def path(name: str, folder: Path = RESULTS) -> Path:
    return folder / f"{name}_{'gpu' if torch.cuda.is_available() else 'cpu'}.json"


def write(name: str, n: int, results: dict, folder: Path = RESULTS) -> Path:
    """Write FOLDER/NAME_<cpu|gpu>.json, by default in benchmarks/results, and return its path."""
    written = path(name, folder)
    written.write_text(json.dumps(made(n, results), indent=2) + "\n")
    return written


def made(n: int, results: dict) -> dict:
    """Return `results` with their provenance."""
    return _provenance(n) | {"results": results}


def held(name: str, n: int, folder: Path = RESULTS) -> dict | None:
    """Return results of an earlier run of the same command, commit, versions, hardware and n; None without one."""
    if not path(name, folder).exists():
        return None
    record = json.loads(path(name, folder).read_text())
    results = record.pop("results")
    return results if record == _provenance(n) else None


def _provenance(n: int) -> dict:
    return {
        "command": shlex.join(["python", *map(_relative, sys.orig_argv[1:])]),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "n": n,
    }


def _relative(word: str) -> str:
    """Return a path in this folder as seen from it, and of one elsewhere its name: a host's folders say nothing."""
    path = Path(word).resolve()
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd())) if path.exists() else word
    return path.name if Path(word).is_absolute() else word


def commit() -> str:
    """Return `TRL_FP8_COMMIT` where it is set: a copy of the working tree on another host may have no repository. Else
    the commit that is checked out, with "-dirty" if anything but results differs from it.
    """
    if stated := os.environ.get("TRL_FP8_COMMIT"):
        return stated
    unchanged = ["git", "diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)benchmarks/results"]
    try:
        described = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True).stdout.strip()
        is_clean = not described or subprocess.run(unchanged).returncode == 0
    except FileNotFoundError:
        return UNKNOWN
    return (described or UNKNOWN) + ("" if is_clean else "-dirty")
