"""`fp8_run.jsonl` in a run's output_dir: a line for its facts, a line for each generation, a line for each log.

Lines are written during the run, so a report can be made of a run that is not finished or was killed. A resumed run
continues the file. A reader leaves out the lines that the earlier attempt wrote after the step of the resume.

A new run in the folder of an earlier one writes to `fp8_run.new.jsonl` until its first step is done. Then the earlier
run's file is renamed to `fp8_run.1.jsonl` (or the next free number), and the new run's file to `fp8_run.jsonl`. So a
run that dies before its first step changes no earlier file, and no log of a step is ever deleted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any


FILE = "fp8_run.jsonl"
NEW = "fp8_run.new.jsonl"  # file of a run until its first step is done, if FILE belongs to an earlier run
LAST = 10  # a report averages a metric over so many logged steps at either end, because single batches vary


@dataclass(frozen=True)
class Run:
    """One run, as read from its file.

    Attributes:
        name: The name of the run's folder, with parent folders if another run has the same name.
        facts: The result of `run_facts` (run/facts.py).
        logs: What TRL logged, a dictionary for each log, as in `trainer.state.log_history`.
        rollouts: A dictionary for each generation: step and, as far as the run recorded them, log_ratio_counts,
            log_ratio_limit, log_probs (run_log.py), kv_scales [L][3], kv_saturation [L][2].
    """

    name: str
    facts: Mapping[str, Any]
    logs: list[dict] = field(repr=False)
    rollouts: list[dict] = field(repr=False)


def append(folder: str | Path, kind: str, row: Mapping[str, Any]) -> None:
    """Add a line ("log" or "rollouts") to the run's file, and `settle` the file if the row's step is above 0."""
    folder = Path(folder)
    if row["step"] > 0:
        settle(folder)
    new = folder / NEW
    _add(new if new.exists() else folder / FILE, kind, row)


def settle(folder: str | Path) -> None:
    """Rename the earlier run's file, if there is one, and give its name to the new run's file.

    Call this when a step is done.
    """
    folder = Path(folder)
    new = folder / NEW
    if new.exists():
        number = max(map(_number, earlier_logs(folder)), default=0) + 1
        with suppress(FileNotFoundError):  # the user has moved the earlier run's file away
            (folder / FILE).rename(folder / f"fp8_run.{number}.jsonl")
        new.rename(folder / FILE)


def begin(folder: str | Path, step: int, facts: Mapping[str, Any]) -> None:
    """Write the facts: at step 0 as the first line of a new file, at a later step into the resumed run's file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    (folder / NEW).unlink(missing_ok=True)  # left by a run that died before its first step
    if step == 0:
        rows = _rows(path) if path.exists() else []
        if any(isinstance(row.get("step"), int | float) and row["step"] > 0 for row in rows):
            path = folder / NEW  # FILE belongs to an earlier run that has logged a step
        else:
            path.unlink(missing_ok=True)
    elif path.exists() and not path.read_bytes().endswith(b"\n"):  # the process was killed in the middle of a line
        with path.open("a") as file:
            file.write("\n")
    _add(path, "run", {"step": step, "facts": facts})


def earlier_logs(folder: str | Path) -> list[Path]:
    """Return the files of earlier runs in the folder, the oldest first."""
    return sorted(filter(_number, Path(folder).glob("fp8_run.*.jsonl")), key=_number)


def _number(path: Path) -> int:
    """Return the number of an earlier run's file; 0 for other files."""
    match = re.fullmatch(r"fp8_run\.(\d+)\.jsonl", path.name)
    return int(match[1]) if match else 0


def read_run(folder: str | Path) -> Run:
    """Read a run. `folder` is the run's folder, or the path of a log file in it, such as one of `earlier_logs`.

    Raises:
        ValueError: There is no log, or it does not begin with a run's facts.
    """
    path = file_of(folder)
    if not path.exists():
        raise ValueError(
            f"RUN={str(path.parent)!r} has no {FILE}: pass the output_dir of a run of FP8GRPOTrainer with "
            "fp8_run_log=True."
        )
    facts = None
    rows = {"log": [], "rollouts": []}
    for row in _rows(path):
        kind = row.pop("kind", None)
        if kind == "run" and isinstance(row.get("facts"), dict) and isinstance(row.get("step"), int):
            facts = row["facts"]
            # The run was resumed here, after step n. It repeats generations recorded with step n, because they sampled
            # for step n + 1. It does not repeat logs of step n, which were written at the end of that step
            rows["log"] = [earlier for earlier in rows["log"] if earlier["step"] <= row["step"]]
            rows["rollouts"] = [earlier for earlier in rows["rollouts"] if earlier["step"] < row["step"]]
            for earlier in rows["log"]:
                earlier.pop("train_runtime", None)  # an earlier attempt ended with it, but the run went on
        elif kind in rows and isinstance(row.get("step"), int | float):
            rows[kind].append(row)
    if facts is None:
        raise ValueError(f"{path} does not begin with a run's facts: it was cut or is another file.")
    return Run(_run_path(path).name, facts, rows["log"], rows["rollouts"])


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read several runs. Their names are the last parts of their paths, as many parts as make all names different.

    Raises:
        ValueError: `read_run` raises it, or a run is named twice.
    """
    paths = [_run_path(file_of(folder)) for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"RUN={str(folder)!r} is named twice. Name each run once.")
    parts = 1
    names = [path.name for path in paths]
    while len(set(names)) < len(names):
        parts += 1
        names = [str(Path(*path.parts[1:][-parts:])) for path in paths]  # without the root, so names are relative
    return [replace(read_run(folder), name=name) for folder, name in zip(folders, names, strict=True)]


def file_of(path: str | Path) -> Path:
    """Return the log file of a run. `path` is this file or the run's folder."""
    path = Path(path)
    is_log = path.name in (FILE, NEW) or _number(path) > 0
    return path if is_log else path / FILE


def _run_path(file: Path) -> Path:
    """Return the path that identifies a run: its folder, or the log file of an earlier run in it."""
    file = file.resolve()
    return file.parent if file.name == FILE else file.with_suffix("")


def _add(path: Path, kind: str, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, **row}, default=str) + "\n")


def _rows(path: Path) -> list[dict]:
    """Return the rows of a file. Skip incomplete lines, left by a process that was killed while it wrote."""
    rows = []
    for line in path.read_bytes().splitlines():
        with suppress(json.JSONDecodeError, UnicodeDecodeError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


@dataclass(frozen=True)
class Stretch:
    """Mean of a metric over consecutive logged steps."""

    mean: float
    steps: str  # such as "steps 1 to 3"


def series(rows: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    """Return the steps at which `key` was logged, in order, and its values times `factor`, without NaN and Inf.

    If a step was logged twice, the later value counts.
    """
    logged = {row["step"]: row[key] for row in rows if "step" in row and row.get(key) is not None}
    steps = [step for step in sorted(logged) if isfinite(logged[step])]
    return steps, [factor * logged[step] for step in steps]


def ends(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[Stretch | None, Stretch | None]:
    """Return the means of a metric over the first and over the last logged steps: `LAST` steps, at most half of all.

    The first mean is None if fewer than two steps were logged, the last mean is None if no step was.
    """
    steps, values = series(rows, key)
    count = max(1, min(LAST, len(steps) // 2))
    first = last = None
    if len(steps) > 1:
        first = Stretch(fmean(values[:count]), span(steps[:count]))
    if steps:
        last = Stretch(fmean(values[-count:]), span(steps[-count:]))
    return first, last


def span(steps: Sequence[int]) -> str:
    """Return `steps 1 to 3` for `[1, 2, 3]`."""
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
