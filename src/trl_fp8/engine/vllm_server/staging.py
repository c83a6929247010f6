"""A file of tensors in shared memory: the trainer writes what the workers of a server read.

The trainer maps the file and writes in place. A worker reads one tensor at a time into memory of its own: a mapping of
a file that somebody truncates would end the worker's process by SIGBUS, and a short read is an error.

The trainer holds a lock on its file, so that files of trainers that died can be told from those in use.
"""

import fcntl
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

import torch
from torch import nn

from trl_fp8.sync.pieces import Piece


Table = dict[str, list]  # name -> [dtype, shape, offset in bytes]
PREFIX = "trl_fp8_"  # of the names of such files
ALIGNED = 64  # bytes, of each tensor's offset


class Staged(nn.Module):
    """One staged tensor in the form of an engine's parameter."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.register_buffer("tensor", tensor)


class StagingFile:
    """The trainer's file, readable by its user alone. It is removed with this object, or when the process ends.

    `tensors`: (dtype, shape) by name, of zeros at first. `OSError` if the folder has no room for all of them.
    """

    def __init__(self, folder: str, tensors: Mapping[str, tuple[str, list[int]]]):
        remove_abandoned(folder)
        self.table: Table = {}
        size = 0
        for name, (dtype, shape) in tensors.items():
            self.table[name] = [dtype, list(shape), size]
            size += -(-_bytes(dtype, shape) // ALIGNED) * ALIGNED
        name = f"{PREFIX}{os.getpid()}_{os.urandom(8).hex()}"
        self.path = os.path.join(folder, name)
        unlocked = os.path.join(folder, f".{name}")  # `remove_abandoned` of another process looks for no such name
        file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with this process, however that ends
        os.rename(unlocked, self.path)
        self.remove = weakref.finalize(self, _remove, self.path, file, os.getpid())  # its tensors stay usable
        try:
            os.posix_fallocate(file, 0, max(size, 1))  # a full folder is an error now, and not SIGBUS later
        except OSError:
            self.remove()
            raise
        whole = torch.from_file(self.path, shared=True, size=max(size, 1), dtype=torch.uint8)
        self.tensors = {name: _view(whole, *place) for name, place in self.table.items()}


class StagedTensors(Mapping[str, torch.Tensor]):
    """A worker's view of a trainer's file. Each look-up reads the tensor anew, into new memory."""

    def __init__(self, file: int, table: Table, path: str):
        self._file, self._table, self._path = file, table, path

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape, offset = self._table[name]
        buffer = torch.empty(_bytes(dtype, shape), dtype=torch.uint8)
        into = memoryview(buffer.numpy())
        done = 0
        while done < len(into):
            count = os.preadv(self._file, [into[done:]], offset + done)
            if count == 0:
                raise ValueError(
                    f"{self._path} ends inside of {name}: somebody truncated it. Start the trainer again."
                )
            done += count
        return buffer.view(getattr(torch, dtype)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def close(self) -> None:
        """Close the file, which frees its memory if the trainer has removed it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self):
        self.close()


def _remove(path: str, file: int, process: int) -> None:
    if os.getpid() == process:  # and not one that was forked from it
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(file)


def opened(path: str, table: Table) -> StagedTensors:
    """Open a trainer's file. `ValueError` if it is not a regular file of this user, or the table exceeds it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"the trainer's file {path} cannot be opened: {error.strerror}.") from error
    staged = StagedTensors(file, table, path)
    found = os.fstat(file)
    if not S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        raise ValueError(f"{path} is not a regular file of this server's user.")
    for name, (dtype, shape, offset) in table.items():
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{path}: {name} has the unknown dtype {dtype!r}.")
        if offset < 0 or min(shape, default=0) < 0 or offset + _bytes(dtype, shape) > found.st_size:
            raise ValueError(f"{path} has {found.st_size} bytes, and its table puts {name} at {offset}, beyond them.")
    return staged


def zeros(tensors: Mapping[str, tuple[str, list[int]]], device: torch.device | None = None) -> dict[str, torch.Tensor]:
    """Return tensors as a `StagingFile` has them, in memory of `device` (CPU) that no server reads."""
    return {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for name, (dtype, shape) in tensors.items()
    }


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Return each tensor as a piece of a layout."""
    return [Piece(name, Staged(tensor), "tensor", tensor.dtype) for name, tensor in tensors.items()]


def remove_abandoned(folder: str) -> list[str]:
    """Remove files of trainers that ended without removing them, and return their paths."""
    removed = []
    for path in Path(folder).glob(f"{PREFIX}*"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or gone by now
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(str(path))
        except OSError:  # its trainer lives
            pass
        finally:
            os.close(file)
    return removed


def _bytes(dtype: str, shape: list[int]) -> int:
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize


def _view(whole: torch.Tensor, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    return whole[offset : offset + _bytes(dtype, shape)].view(getattr(torch, dtype)).view(shape)
