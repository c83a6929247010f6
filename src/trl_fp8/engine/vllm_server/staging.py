"""A file of tensors in shared memory: the trainer writes what the workers of a server read.

The trainer maps the file and writes in place. A worker reads one tensor at a time into memory of its own. If somebody
truncates the file, a read raises an error, but a mapping would kill the process (SIGBUS).

The trainer locks its file as long as it runs. A file without a lock belongs to a dead trainer.
"""

import fcntl
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from stat import S_ISREG

import torch
from torch import nn

from trl_fp8.sync.pieces import Piece


Table = dict[str, list]  # name -> [dtype, shape, offset in bytes]
PREFIX = "trl_fp8_"  # the names of such files begin with this
ALIGNED = 64  # bytes; the offset of each tensor in a file is a multiple of this


class Staged(nn.Module):
    """A module with one staged tensor, because a `Piece` finds its tensor in a module."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.register_buffer("tensor", tensor)


class LockedFile:
    """A file of this process, readable by its user alone. It is removed with this object, or when the process ends.

    It has `size` bytes, but at least 1. Raises `OSError` if the folder has no room for them.
    """

    def __init__(self, folder: str, size: int):
        name = f"{PREFIX}{os.getpid()}_{os.urandom(8).hex()}"
        self.path = os.path.join(folder, name)
        unlocked = os.path.join(folder, f".{name}")  # hides it from `remove_abandoned` until it is locked
        file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)  # until this process ends, even by a kill
        os.rename(unlocked, self.path)
        self._file = file
        self.remove = weakref.finalize(self, _remove, self.path, file, os.getpid())
        try:
            os.posix_fallocate(file, 0, max(size, 1))  # a full folder is an error now, and not SIGBUS later
        except OSError:
            self.remove()
            raise

    def flush(self) -> None:
        """Write to disk, so that other hosts that mount the folder see it. Does nothing for files in memory."""
        os.fsync(self._file)


class PatchFile(LockedFile):
    """A file with the bytes of a patch (weight_patches.py)."""

    def __init__(self, folder: str, body: bytes):
        super().__init__(folder, len(body))
        with open(self.path, "r+b") as file:
            file.write(body)
        os.truncate(self.path, len(body))  # `LockedFile` allocates 1 byte for an empty body


class StagingFile(LockedFile):
    """The trainer's file. The argument `tensors` maps names to (dtype, shape).

    The attribute `tensors` has views of the file, zeros at first, which stay usable after the file's removal.
    """

    def __init__(self, folder: str, tensors: Mapping[str, tuple[str, list[int]]]):
        remove_abandoned(folder)
        self.table, size = arranged(tensors)
        super().__init__(folder, size)
        self.buffer = torch.from_file(self.path, shared=True, size=max(size, 1), dtype=torch.uint8)[:size]
        self.tensors = views(self.buffer, self.table)


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
    if os.getpid() == process:  # a process that was forked from it leaves the file alone
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(file)


def opened(path: str, table: Table) -> StagedTensors:
    """Open a trainer's file. `ValueError` if it is not a regular file of this user, or the table does not fit it."""
    file = _open_regular(path)
    staged = StagedTensors(file, table, path)
    size = os.fstat(file).st_size
    for name, (dtype, shape, offset) in table.items():
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{path}: {name} has the unknown dtype {dtype!r}.")
        if offset < 0 or min(shape, default=0) < 0 or offset + _bytes(dtype, shape) > size:
            raise ValueError(f"{path} has {size} bytes, and its table puts {name} at {offset}, beyond them.")
    return staged


def read(path: str, table: Table) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor of a trainer's file. Raise `ValueError` where `opened` does."""
    with closing(opened(path, table)) as staged:  # while a removed file is open, its memory is not freed
        yield from staged.items()


def content(path: str, size: int) -> bytes:
    """Return a file's bytes. `ValueError` unless it is a regular file of this user with `size` bytes."""
    body = b""
    with os.fdopen(_open_regular(path), "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found == size:
            body = file.read(size)
    if len(body) != size:  # also if somebody truncated the file since `fstat`
        raise ValueError(f"{path} has {found} bytes instead of {size}.")
    return body


def _open_regular(path: str) -> int:
    """Return a descriptor. Raise `ValueError` if `path` cannot be opened, or is not a regular file of this user."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"the trainer's file {path} cannot be opened: {error.strerror}.") from error
    found = os.fstat(file)
    if not S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(file)
        raise ValueError(f"{path} is not a regular file of this server's user.")
    return file


def arranged(tensors: Mapping[str, tuple[str, list[int]]]) -> tuple[Table, int]:
    """Return the place of each tensor in one buffer, and the buffer's size in bytes. Tensors are sorted by element
    size, because a patch lists positions by element size, counted in elements.
    """

    def element_size(name: str) -> int:
        dtype, _ = tensors[name]
        return getattr(torch, dtype).itemsize

    table: Table = {}
    size = 0
    for name in sorted(tensors, key=element_size):
        dtype, shape = tensors[name]
        table[name] = [dtype, list(shape), size]
        size += -(-_bytes(dtype, shape) // ALIGNED) * ALIGNED  # rounded up
    return table, size


def size_of(table: Table) -> int:
    """Return the sum of the tensors' sizes in bytes."""
    return sum(_bytes(dtype, shape) for dtype, shape, _ in table.values())


def views(buffer: torch.Tensor, table: Table) -> dict[str, torch.Tensor]:
    """Return the tensors as views of a buffer of bytes (uint8)."""
    found = {}
    for name, (dtype, shape, offset) in table.items():
        part = buffer[offset : offset + _bytes(dtype, shape)]
        found[name] = part.view(getattr(torch, dtype)).view(shape)
    return found


def buckets(table: Table, most_bytes: int) -> list[tuple[int, int, Table]]:
    """Split a buffer into consecutive parts. Return (start, end, table) of each part.

    `end` is exclusive, and the table counts offsets from `start`. A part has one tensor, or several that span at most
    `most_bytes`.
    """
    parts: list[tuple[int, int, Table]] = []
    for name, (dtype, shape, offset) in table.items():
        end = offset + _bytes(dtype, shape)
        if not parts or end - parts[-1][0] > most_bytes:
            parts.append((offset, end, {}))  # begin another part
        start, _, tensors = parts[-1]
        tensors[name] = [dtype, shape, offset - start]
        parts[-1] = (start, end, tensors)
    return parts


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Return a `Piece` for each tensor."""
    return [Piece(name, Staged(tensor), attribute="tensor", dtype=tensor.dtype) for name, tensor in tensors.items()]


def remove_abandoned(folder: str) -> list[str]:
    """Remove files of trainers that ended without removing them, and return their paths."""
    removed = []
    for path in Path(folder).glob(f"{PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # O_RDWR: NFS requires it for a lock
        except OSError:  # another user's file, or removed by now
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(str(path))
        except OSError:  # locked: its trainer is still running
            pass
        finally:
            os.close(file)
    return removed


def _bytes(dtype: str, shape: list[int]) -> int:
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize
