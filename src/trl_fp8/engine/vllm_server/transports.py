"""Transports: the ways in which the trainer's bytes reach the workers of a server.

    Folder      the workers read the trainer's files, in a folder that both hosts see
    Bodies      the trainer sends the content of its files in HTTP bodies, and the server writes files (uploads.py)
    Broadcast   the trainer broadcasts whole policies from the policy's device, by NCCL or gloo (broadcast.py)
    CudaIpc     the workers read whole policies in the trainer's memory on a GPU (cuda_ipc.py)

`Broadcast` and `CudaIpc` leave patches (weight_patches.py) to `Folder` or `Bodies`.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol
from urllib.parse import urlsplit

import torch

from .broadcast import address_towards, broadcasting
from .client import ServerGone
from .cuda_ipc import exported
from .staging import PatchFile, StagingFile
from .uploads import MAX_CHUNK_BYTES


# Value of vllm_server_transport -> types of device on which the policy may be. Other values allow any device
DEVICES = {"broadcast": ("cpu", "cuda"), "cuda_ipc": ("cuda",)}


class Transport(Protocol):
    """Brings bytes to one server, whose workers must read them before the `with` block of a method ends. The methods
    raise `OSError` if there is no room.
    """

    name: str  # for messages to the user

    def whole(self, file: StagingFile, staged: torch.Tensor) -> AbstractContextManager[dict]:
        """Yield the arguments of `Receiver._sent` (receiver.py) with which a worker finds all of a policy.

        `staged` has the same bytes as `file`, on the policy's device.
        """

    def patch(self, file: StagingFile, body: bytes) -> AbstractContextManager[str]:
        """Yield the path at which workers read the patch `body`."""


class Uploader(Protocol):
    """A client that sends a chunk of a file to a server, and returns the file's path at the server."""

    def upload(self, kind: str, offset: int, size: int, chunk: bytes) -> str: ...


class Folder:
    """A folder that trainer and workers see."""

    def __init__(self, folder: str):
        self.name = f"files in {folder}"

    @contextmanager
    def whole(self, file: StagingFile, staged: torch.Tensor) -> Iterator[dict]:
        yield {"file": file.path}

    @contextmanager
    def patch(self, file: StagingFile, body: bytes) -> Iterator[str]:
        patch = PatchFile(os.path.dirname(file.path), body)
        try:
            yield patch.path
        finally:
            patch.remove()


class Bodies:
    """HTTP bodies, one for each chunk of a file. `reason` says why the server does not read the trainer's files."""

    def __init__(self, control: Uploader, reason: str):
        self._control = control
        self.name = f"HTTP bodies, because the server does not see the trainer's files ({reason})"

    @contextmanager
    def whole(self, file: StagingFile, staged: torch.Tensor) -> Iterator[dict]:
        yield {"file": self._sent("whole", memoryview(file.buffer.numpy()))}

    @contextmanager
    def patch(self, file: StagingFile, body: bytes) -> Iterator[str]:
        yield self._sent("patch", memoryview(body))  # the server removes it at the end of the update

    def _sent(self, kind: str, content: memoryview) -> str:
        path = ""
        for offset in range(0, max(len(content), 1), MAX_CHUNK_BYTES):  # at least one chunk, which may be empty
            chunk = bytes(content[offset : offset + MAX_CHUNK_BYTES])
            path = self._control.upload(kind, offset, len(content), chunk)
        return path


class Broadcast:
    """Broadcasts of whole policies to the workers of the server at `base_url`. `patches` brings patches."""

    def __init__(self, base_url: str, workers: int, patches: Transport):
        self._base_url = base_url
        self._workers = workers
        self.name = f"broadcasts, and patches by {patches.name}"
        self.patch = patches.patch

    @contextmanager
    def whole(self, file: StagingFile, staged: torch.Tensor) -> Iterator[dict]:
        server = urlsplit(self._base_url)
        default_port = 443 if server.scheme == "https" else 80
        try:
            own_address = address_towards(server.hostname, server.port or default_port)
        except OSError as error:
            raise ServerGone(f"the server at {self._base_url} does not answer: {error!r}") from error
        with broadcasting(staged, file.table, own_address, self._workers) as where:
            yield {"broadcast": where}


class CudaIpc:
    """Whole policies that the workers of a server on this host read on the trainer's GPU. `patches` brings patches."""

    def __init__(self, workers: int, patches: Transport):
        self._workers = workers
        self.name = f"CUDA IPC, and patches by {patches.name}"
        self.patch = patches.patch

    @contextmanager
    def whole(self, file: StagingFile, staged: torch.Tensor) -> Iterator[dict]:
        # One handle for each worker: torch counts readers by handles
        yield {"cuda_ipc": [exported(staged) for _ in range(self._workers)]}


def require_device(transport: str, device: torch.device) -> None:
    """Raise `ValueError` if `transport`, a value of `vllm_server_transport`, takes no policy on this device."""
    types = DEVICES.get(transport, (device.type,))
    if device.type not in types:
        raise ValueError(
            f"vllm_server_transport={transport!r} with a policy on {device.type}: it is for {' and '.join(types)}. "
            "Set vllm_server_transport='auto'."
        )
