"""The error for a disk that is full in the middle of a run: one sentence with the way on."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .checkpoints import checkpoints


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEAST = 2**20  # bytes; PyTorch's writer fills the disk, and raises an error without a number


class FullDisk(OSError):
    """A run could not write to `output_dir` for lack of room."""


@contextmanager
def explained_full_disk(output_dir: str | Path) -> Iterator[None]:
    """Raise `FullDisk` in the place of an error inside the block if the disk of `output_dir` is full."""
    try:
        yield
    except FullDisk:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _has_full_disk(error, output_dir):
            raise
        whole, unfinished = checkpoints(output_dir)
        what = unfinished[-1].name if unfinished else "what the run writes"
        rest = f" {what} is incomplete and can be deleted;" if unfinished else ""
        way_on = f"goes on from {whole[-1].name}" if whole else "starts from the beginning, for there is no checkpoint"
        raise FullDisk(
            f"no room for {what} in {output_dir}: its disk is full. Make room;{rest} then "
            f"resume_from_checkpoint='auto' {way_on}."
        ) from error


def _has_full_disk(error: BaseException | None, folder: str | Path) -> bool:
    """Return whether an error or one that led to it says so, or the disk has no room left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if isinstance(error, SafetensorError) and any(f"(os error {number})" in str(error) for number in FULL):
            return True
        error = error.__cause__ or error.__context__
    disk = shutil.disk_usage(folder)
    return bool(disk.total) and disk.free < LEAST  # a file system without accounting reports 0
