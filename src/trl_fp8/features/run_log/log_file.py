"""`fp8_run.jsonl` in a run's output_dir: a line for its facts, a line for each generation, a line for each log.

It is written as the run goes, so that a report can be made of a run that is not finished or was killed. A resumed run
continues the file: lines of an earlier attempt beyond the step of the resume do not count.

A run that begins at step 0 in the folder of another one writes to `fp8_run.new.jsonl` until its first step is done.
Then the other run's file becomes `fp8_run.1.jsonl` (or the next free number), and the new one takes its name. So a run
that dies before its first step costs the folder nothing, and no log of a step is ever deleted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any


FILE = "fp8_run.jsonl"
LAST = 10  # logged steps at either end over which a metric is averaged, so that one batch does not decide
NEW = "fp8_run.new.jsonl"  # of a run whose first step is not done, where there is a file of an earlier run


@dataclass(frozen=True)
class Run:
    """One run as its file tells it.

    Attributes:
        name: Its folder's name; with parent folders if another run has the same.
        facts: `run_facts`.
        logs: What TRL logged, by step, as in `trainer.state.log_history`.
        rollouts: One entry a generation: step, log_ratio_counts, log_ratio_limit, log_probs, kv_scales [L][3],
            kv_saturation [L][2], as far as the run had them.
    """

    name: str
    facts: Mapping[str, Any]
    logs: list[dict] = field(repr=False)
    rollouts: list[dict] = field(repr=False)


def append(folder: str | Path, kind: str, row: Mapping[str, Any]) -> None:
    """Add a line of a kind ("run", "log" or "rollouts") at once."""
    folder = Path(folder)
    if row["step"] > 0:
        settle(folder)
    new = folder / NEW
    _add(new if new.exists() else folder / FILE, kind, row)


def settle(folder: str | Path) -> None:
    """Give the run's file the name of an earlier run's, which gets a number. Call it when a step is done."""
    folder = Path(folder)
    new = folder / NEW
    if new.exists():
        number = max(map(_number, earlier_logs(folder)), default=0) + 1
        (folder / FILE).rename(folder / f"fp8_run.{number}.jsonl")
        new.rename(folder / FILE)


def begin(folder: str | Path, step: int, facts: Mapping[str, Any]) -> None:
    """Start a file at step 0, or continue the one of the run that is resumed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path, new = folder / FILE, folder / NEW
    new.unlink(missing_ok=True)  # of a run that died before its first step
    if step == 0 and _has_steps(path):
        path = new
    elif step == 0:
        path.unlink(missing_ok=True)
    elif path.exists() and not path.read_bytes().endswith(b"\n"):  # killed in the middle of a line
        with path.open("a") as file:
            file.write("\n")
    _add(path, "run", {"step": step, "facts": facts})


def earlier_logs(folder: str | Path) -> list[Path]:
    """Return the files of the runs that were in the folder before, the oldest first."""
    return sorted(filter(_number, Path(folder).glob("fp8_run.*.jsonl")), key=_number)


def _number(path: Path) -> int:
    """Return the number of an earlier run's file; 0 for other files."""
    match = re.fullmatch(r"fp8_run\.(\d+)\.jsonl", path.name)
    return int(match[1]) if match else 0


def read_run(folder: str | Path) -> Run:
    """Read a run's file, which may be named instead of its folder; one of `earlier_logs` has to be.

    Raises:
        ValueError: There is none, or it does not begin with a run's facts.
    """
    path = file_of(folder)
    folder = path.parent
    if not path.exists():
        raise ValueError(
            f"RUN={str(folder)!r} has no {FILE}: pass the output_dir of a run of FP8GRPOTrainer with fp8_run_log=True."
        )
    facts = None
    rows = {"log": [], "rollouts": []}
    for row in map(_parsed, path.read_bytes().splitlines()):
        kind = row.pop("kind", None)
        if kind == "run" and isinstance(row.get("facts"), dict) and isinstance(row.get("step"), int):
            facts = row["facts"]
            rows["log"] = [earlier for earlier in rows["log"] if earlier["step"] <= row["step"]]
            rows["rollouts"] = [earlier for earlier in rows["rollouts"] if earlier["step"] < row["step"]]
        elif kind in rows and isinstance(row.get("step"), int | float):
            rows[kind].append(row)
    if facts is None:
        raise ValueError(f"{path} does not begin with a run's facts: it was cut or is another file.")
    return Run(_run_path(path).name, facts, rows["log"], rows["rollouts"])


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read several runs. Each is named by as much of its path as tells it from the others.

    Raises:
        ValueError: As `read_run`, or a folder is named twice.
    """
    paths = [_run_path(file_of(folder)) for folder in folders]
    if twice := [str(folder) for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise ValueError(f"RUN={twice[0]!r} is named twice. Name each run once.")
    depths = range(1, max(len(path.parts) for path in paths) + 1)
    tails = ([str(Path(*path.parts[-depth:])) for path in paths] for depth in depths)
    names = next(names for names in tails if len(set(names)) == len(names))
    return [replace(read_run(folder), name=name) for folder, name in zip(folders, names, strict=True)]


def file_of(path: str | Path) -> Path:
    """Return the file of a run that is named by its folder or by the file."""
    path = Path(path)
    return path if path.name in (FILE, NEW) or _number(path) else path / FILE


def _run_path(file: Path) -> Path:
    """Return the path that identifies a run: its folder, or the log file of an earlier run in it."""
    file = file.resolve()
    return file.parent if file.name == FILE else file.with_suffix("")


def _has_steps(file: Path) -> bool:
    """Return whether a run reached its first step."""
    rows = map(_parsed, file.read_bytes().splitlines()) if file.exists() else ()
    return any(isinstance(row.get("step"), int | float) and row["step"] > 0 for row in rows)


def _add(path: Path, kind: str, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, **row}, default=str) + "\n")


def _parsed(line: bytes) -> dict:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):  # the process was killed while it wrote this line
        return {}
    return row if isinstance(row, dict) else {}


@dataclass(frozen=True)
class Stretch:
    """Mean of a metric over consecutive logged steps."""

    mean: float
    steps: str  # which


def series(rows: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    """Return steps in order and their values, without NaN and Inf. Of a step logged twice the last value counts."""
    logged = {row["step"]: row[key] for row in rows if "step" in row and row.get(key) is not None}
    points = [(step, factor * value) for step, value in sorted(logged.items()) if isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def ends(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[Stretch | None, Stretch | None]:
    """Return the means of the first and the last logged steps: `LAST` of them, or half of what there is. A single step
    is only the last.
    """
    steps, values = series(rows, key)
    count = max(1, min(LAST, len(steps) // 2))
    first = Stretch(fmean(values[:count]), span(steps[:count])) if len(steps) > 1 else None
    return first, Stretch(fmean(values[-count:]), span(steps[-count:])) if steps else None


def span(steps: Sequence[int]) -> str:
    """Return `steps 1 to 3` for `[1, 2, 3]`."""
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
