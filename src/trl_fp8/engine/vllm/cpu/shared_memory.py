"""Shared memory through which ranks of a CPU engine exchange tensors.

vLLM names each rank's segment by the engine's ranks alone if a launcher started them (its init method is "env://").
It cannot start while there is a segment of this name: "create shm in SHMManager failed. errno: 17".
"""

from contextlib import suppress
from pathlib import Path


FOLDER = Path("/dev/shm")  # noqa: S108, where Linux shows POSIX shared memory


def remove_abandoned_memory(rank: int, ranks: int) -> None:
    """Remove this rank's segment if a run has left it that was killed.

    Args:
        rank: Number of this process in the launch.
        ranks: Number of an engine's ranks, consecutive in the launch.

    Raises:
        ValueError: The segment belongs to a run that goes on.
    """
    first = rank - rank % ranks
    ending = f"-[{'-'.join(map(str, range(first, first + ranks)))}]-cpushm_{rank - first}"
    for path in FOLDER.iterdir():
        if not (path.name.startswith("-") and path.name.endswith(ending)) or _is_mapped(path, "self"):
            continue
        if any(_is_mapped(path, process.name) for process in Path("/proc").glob("[0-9]*")):
            raise ValueError(
                f"vllm_tensor_parallel_size={ranks} on a CPU: another run's engine of as many ranks is running on "
                "this host, and vLLM gives both the same shared memory. Wait until it ends, or set "
                "vllm_tensor_parallel_size=1."
            )
        path.unlink(missing_ok=True)


def _is_mapped(path: Path, process: str) -> bool:
    """Return whether a process has `path` in its memory; False if it has ended, or is another user's."""
    with suppress(OSError):
        return f" {path}\n" in Path("/proc", process, "maps").read_text()
    return False
