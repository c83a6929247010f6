"""Shared memory through which ranks of a CPU engine exchange tensors.

If a launcher has started the ranks (the init method is "env://"), vLLM builds the name of a rank's segment only from
the numbers of the engine's ranks. An engine cannot start while there is a segment of this name: "create shm in
SHMManager failed. errno: 17".
"""

from contextlib import suppress
from pathlib import Path


FOLDER = Path("/dev/shm")  # noqa: S108, where Linux shows POSIX shared memory


def remove_abandoned_memory(rank: int, ranks: int) -> None:
    """Remove this rank's segment if a killed run has left it.

    Args:
        rank: Number of this process in the launch.
        ranks: How many ranks an engine has. Their numbers in the launch are consecutive.

    Raises:
        ValueError: The segment belongs to a run that is still running.
    """
    first = rank - rank % ranks
    engine_ranks = "-".join(str(each) for each in range(first, first + ranks))
    ending = f"-[{engine_ranks}]-cpushm_{rank - first}"
    for path in FOLDER.iterdir():
        has_name = path.name.startswith("-") and path.name.endswith(ending)
        if not has_name or _is_mapped(path, "self"):  # "self": this process has made the segment for an earlier engine
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
