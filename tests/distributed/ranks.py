"""Start a test's function on several ranks, each a process with an engine of its own, and collect what they report."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from testing.processes import alone, free_port


ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SECONDS = 280  # below the tests' own limit, so that a hang ends with the ranks' output in the report


@dataclass
class Ended:
    """A launch that is over: exit status, the output of all ranks, and what each rank reported (by rank)."""

    status: int
    output: str
    reports: list[dict]


def launch(function: str, folder: Path, *, config: Path | None = None, ranks: int = 2, **options) -> list[dict]:
    """Run `worker.<function>(**options)` on every rank; returns their reports.

    Args:
        function: Name in tests/distributed/worker.py.
        folder: For reports and whatever the function writes.
        config: An accelerate configuration; None: torchrun, which is DDP.
        ranks: World size; every rank has to report it.
        **options: JSON values.
    """
    ended = run(function, folder, config=config, ranks=ranks, **options)
    assert ended.status == 0, ended.output[-6000:]
    assert [report["ranks"] for report in ended.reports] == [ranks] * ranks, "the ranks do not know of each other"
    return ended.reports


def run(function: str, folder: Path, *, config: Path | None = None, ranks: int = 2, **options) -> Ended:
    """As `launch`, whatever the outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank_*.json"):
        old.unlink()
    port = str(free_port())
    if config is None:
        command = [BIN / "torchrun", "--nproc_per_node", ranks, "--master_addr", "127.0.0.1", "--master_port", port]
    else:
        command = [BIN / "accelerate", "launch", "--config_file", config, "--num_processes", ranks]
        command += ["--main_process_port", port]
    command += ["-m", "tests.distributed.worker", function, folder, json.dumps(options)]
    # accelerate calls the device of a rank on CPU "cpu:0", where torch cannot load an optimizer's state
    cpu = {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    environment = alone() | cpu | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        raise AssertionError(f"{function} did not end within {SECONDS} s:\n{output[-6000:]}") from None
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
    return Ended(done.returncode, done.stdout, reports)
