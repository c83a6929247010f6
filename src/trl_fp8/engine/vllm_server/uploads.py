"""`Uploads`: files that a trainer sends to a server in HTTP bodies, for workers that cannot see its folder.

A file comes in chunks, each of which continues the chunk before. The answer to each chunk has the file's path.
Checksums prove what workers read, as for a file that the trainer wrote.
"""

import os

from .staging import LockedFile


KINDS = ("whole", "patch")  # the file has all tensors of a policy, or a patch
MAX_CHUNK_BYTES = 32 * 2**20


class UploadRefused(Exception):
    """The error for a chunk that is not written."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status  # of the HTTP answer


class Upload(LockedFile):
    """A file of `size` bytes in the server's folder. Raises `OSError` if there is no room for it."""

    def __init__(self, folder: str, trainer: bytes, size: int):
        super().__init__(folder, size)
        os.truncate(self.path, size)  # `LockedFile` allocates 1 byte for an empty file
        self.trainer = trainer
        self.size = size
        self.received = 0  # bytes written so far

    def write(self, chunk: bytes, offset: int) -> None:
        rest = memoryview(chunk)
        while rest:  # `pwrite` may write only a part
            written = os.pwrite(self._file, rest, offset)
            offset += written
            rest = rest[written:]
        self.received = offset


class Uploads:
    """The files of the trainer that uploaded last, at most one of each of `KINDS`."""

    def __init__(self, folder: str):
        self._folder = folder
        self._files: dict[str, Upload] = {}

    def remove_others(self, trainer: bytes) -> None:
        """Remove files of other trainers."""
        for kind, file in list(self._files.items()):
            if file.trainer != trainer:
                self.remove(kind)

    def remove(self, kind: str) -> None:
        file = self._files.pop(kind, None)
        if file is not None:
            file.remove()

    def write(self, trainer: bytes, kind: str, offset: int, size: int, chunk: bytes, most_bytes: int) -> str:
        """Write a chunk at `offset` of a file of `size` bytes, and return the file's path.

        A chunk at offset 0 begins the file. It overwrites an earlier file of the same trainer, kind and size, which
        keeps its path. Raises `UploadRefused` if the file is larger than `most_bytes`, if there is no room for it, or
        if the chunk does not continue the latest one.
        """
        if kind not in KINDS:
            raise UploadRefused(400, f"an upload is one of {KINDS}, and not {kind!r}.")
        if not 0 <= size <= most_bytes:
            raise UploadRefused(413, f"a file of {size} bytes exceeds what this server's workers hold, {most_bytes}.")
        file = self._files.get(kind)
        is_same = file is not None and file.trainer == trainer and file.size == size
        if offset == 0 and not is_same:
            self.remove(kind)
            try:
                file = Upload(self._folder, trainer, size)
            except OSError as error:
                raise UploadRefused(507, f"{self._folder} has no room for {size} bytes: {error.strerror}.") from error
            self._files[kind] = file
        elif offset != 0 and not (is_same and offset == file.received):
            raise UploadRefused(409, f"a chunk at byte {offset} does not continue this trainer's latest one.")
        if offset + len(chunk) > size:
            raise UploadRefused(413, f"a chunk of {len(chunk)} bytes at byte {offset} ends beyond the file's {size}.")
        file.write(chunk, offset)
        return file.path
