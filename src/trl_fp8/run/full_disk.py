"""The error for a disk that is full in the middle of a run. Its message says how to continue."""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .checkpoints import checkpoints


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A disk with fewer free bytes counts as full. PyTorch's writer raises an error without errno for a full disk
LEAST = 2**20


class FullDisk(OSError):
    """A run could not write to `output_dir` for lack of room."""


@contextmanager
def explained_full_disk(output_dir: str | Path, last_checkpoint: Callable[[], str | None]) -> Iterator[None]:
    """Raise `FullDisk` in place of an error inside the block if the disk of `output_dir` is full.

    Args:
        output_dir: The folder of the run. An earlier run may have left checkpoints in it.
        last_checkpoint: Returns the latest complete checkpoint of this run; None if it has none yet.
    """
    try:
        yield
    except FullDisk:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _has_full_disk(error, output_dir):
            raise
        written = "what the run writes"
        deletable = ""
        whole, unfinished = checkpoints(output_dir)
        if unfinished:
            written = max(unfinished, key=lambda folder: folder.stat().st_mtime).name
            deletable = f" {written} is incomplete and can be deleted;"
        last = last_checkpoint()
        if last is None:
            resume = "start again without resume_from_checkpoint, for this run has no checkpoint yet"
        elif whole and Path(last) == whole[-1]:
            resume = f"resume_from_checkpoint='auto' goes on from {whole[-1].name}"
        else:  # an earlier run went further, or the checkpoint is in another folder
            resume = f"resume_from_checkpoint={last!r} goes on from it"
        raise FullDisk(
            f"no room for {written} in {output_dir}: its disk is full ({error}). Make room;{deletable} then {resume}."
        ) from error


def _has_full_disk(error: BaseException | None, folder: str | Path) -> bool:
    """Return whether `error` or a cause of it means a full disk, or `folder`'s disk is full now."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            # The error may be of a file elsewhere, such as a compiler's cache, whose disk is full instead
            return not error.filename or Path(error.filename).resolve().is_relative_to(Path(folder).resolve())
        if isinstance(error, SafetensorError) and any(f"(os error {number})" in str(error) for number in FULL):
            return True
        error = error.__cause__ or error.__context__
    if not Path(folder).exists():  # transformers creates it only on the first rank of a host
        return False
    disk = shutil.disk_usage(folder)
    return bool(disk.total) and disk.free < LEAST  # a file system without accounting reports 0
