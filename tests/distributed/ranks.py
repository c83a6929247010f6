"""Start a test's function on several ranks, each a process with an engine of its own, and collect what they report.

`launch` runs `accelerate launch` or torchrun, as a user does: three processes import everything. `fork` forks the
ranks from the test's process, which has imported it, into the environment that accelerate would give them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from testing import processes
from testing.processes import alone, free_port


ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SECONDS = 540  # below the tests' own limit, so that a hang ends with the ranks' output in the report


# accelerate calls the device of a rank on CPU "cpu:0", where torch cannot load an optimizer's state
CPU = {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


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
    return _reports(run(function, folder, config=config, ranks=ranks, **options), ranks)


def fork(function: str, folder: Path, *, config: Path | None = None, ranks: int = 2, **options) -> list[dict]:
    """As `launch`, in forks of this process. An engine that runs in it is lost."""
    from . import worker  # not above: modules that only launch need not import it

    folder.mkdir(parents=True, exist_ok=True)
    environment = CPU | _environment_of(config, ranks)
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running: dict[int, Path] = {}  # process -> its log
    for rank in range(ranks):
        log = folder / f"rank_{rank}.log"
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running[processes.fork(partial(worker.run_forked, function, folder, options, own), log)] = log
    logs = [*running.values()]
    status = 0
    end = time.monotonic() + SECONDS
    try:
        while running and not status and time.monotonic() < end:
            for process in [*running]:
                done, code = os.waitpid(process, os.WNOHANG)
                if done:
                    del running[process]
                    status = status or code
            time.sleep(0.05)
    finally:  # the others would wait for one that is dead, and go on after an interrupted test
        for process in running:
            status = status or 1
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    output = "\n".join(log.read_text() for log in logs)
    return _reports(Ended(status, output, _reported(folder)), ranks)


def _environment_of(config: Path | None, ranks: int) -> dict[str, str]:
    """Return what `accelerate launch` adds to the environment of ranks for a configuration; nothing for None."""
    if config is None:
        return {}
    import torch.distributed.run as torchrun
    from accelerate.commands.launch import launch_command, launch_command_parser

    words = ["--config_file", str(config), "--num_processes", str(ranks), "-m", "tests.distributed.worker"]
    added = {}

    def note_environment(args) -> None:
        added.update({name: value for name, value in os.environ.items() if before.get(name) != value})

    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torchrun, "run", note_environment)
        launch_command(launch_command_parser().parse_args(words))
    assert added, "accelerate has not come to torchrun"
    return added


def _reports(ended: Ended, ranks: int) -> list[dict]:
    """Return the reports of ranks that have ended well."""
    assert ended.status == 0, ended.output[-6000:]
    assert [report["ranks"] for report in ended.reports] == [ranks] * ranks, "the ranks do not know of each other"
    return ended.reports


def _reported(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


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
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env=alone() | CPU,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        raise AssertionError(f"{function} did not end within {SECONDS} s:\n{output[-6000:]}") from None
    return Ended(done.returncode, done.stdout, _reported(folder))
