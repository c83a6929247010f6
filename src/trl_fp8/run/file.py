"""`fp8_run.jsonl` in a run's output_dir: a line for its facts, a line for each generation, a line for each log.

It is written as the run goes, so that a report can be made of a run that is not finished or was killed. A resumed run
continues the file: what an earlier attempt had done beyond the step from which it was resumed does not count.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


FILE = "fp8_run.jsonl"


@dataclass(frozen=True)
class Run:
    """One run as its file tells it.

    Attributes:
        name: Of its folder; with folders above it where another run has the same.
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
    with Path(folder, FILE).open("a") as file:
        file.write(json.dumps({"kind": kind, **row}, default=str) + "\n")


def begin(folder: str | Path, step: int, facts: Mapping[str, Any]) -> None:
    """Start a file at step 0, or continue one that a run is resumed from."""
    path = Path(folder, FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    if step == 0:
        path.unlink(missing_ok=True)
    elif path.exists() and not path.read_bytes().endswith(b"\n"):  # killed in the middle of a line
        with path.open("a") as file:
            file.write("\n")
    append(folder, "run", {"step": step, "facts": facts})


def run_folder(path: str | Path) -> Path:
    """The folder of a run that is named by it, or by the file in it."""
    return Path(path).parent if Path(path).name == FILE else Path(path)


def read_run(folder: str | Path) -> Run:
    """Read a run's file, which may be named instead of its folder.

    Raises:
        ValueError: There is none, or it does not begin with a run's facts.
    """
    folder = run_folder(folder)
    path = folder / FILE
    if not path.exists():
        raise ValueError(
            f"RUN={str(folder)!r} has no {FILE}: pass the output_dir of a run of FP8GRPOTrainer with fp8_run_log=True."
        )
    facts, rows = None, {"log": [], "rollouts": []}
    for row in map(_parsed, path.read_bytes().splitlines()):
        kind = row.pop("kind", None)
        if kind == "run" and isinstance(row.get("facts"), dict) and isinstance(row.get("step"), int):
            facts, resumed = row["facts"], row["step"]
            rows["log"] = [earlier for earlier in rows["log"] if earlier["step"] <= resumed]
            rows["rollouts"] = [earlier for earlier in rows["rollouts"] if earlier["step"] < resumed]
        elif kind in rows and isinstance(row.get("step"), int | float):
            rows[kind].append(row)
    if facts is None:
        raise ValueError(f"{path} does not begin with a run's facts: it was cut or is another file.")
    return Run(folder.resolve().name, facts, rows["log"], rows["rollouts"])


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read several, each with as much of its path for a name as tells it from the others.

    Raises:
        ValueError: As `read_run`, or a folder is named twice.
    """
    paths = [run_folder(folder).resolve() for folder in folders]
    if twice := [str(folder) for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise ValueError(f"RUN={twice[0]!r} is named twice. Name each run once.")
    depths = range(1, max(len(path.parts) for path in paths) + 1)
    tails = ([str(Path(*path.parts[-depth:])) for path in paths] for depth in depths)
    names = next(names for names in tails if len(set(names)) == len(names))
    return [replace(read_run(folder), name=name) for folder, name in zip(folders, names, strict=True)]


def _parsed(line: bytes) -> dict:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):  # the process was killed while it wrote this line
        return {}
    return row if isinstance(row, dict) else {}
