"""Broadcasts of a whole policy from the trainer, rank 0, to the workers of one server, ranks 1 to n.

    trainer (`broadcasting`)                    worker (`received`)
    a store listens; /update_weights says where ->  connects to the store
    meet: each rank says that it is ready, or why not
    group: gloo, or for a policy on a GPU vLLM's NCCL communicator
    broadcast a bucket of tensors               write its tensors
    meet again: nobody closes the group before all have everything

The group exists during one transfer. So a failed transfer leaves nothing behind, a restarted server needs no repair,
and NCCL takes no GPU memory between transfers. A rank waits at most `SECONDS` for others in each step, except in
NCCL's own start. NCCL's start never returns if a rank ends right before it; the server then has to be started again.
`NcclGroup` follows vLLM's weight_transfer/nccl_engine.py, and has never run.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from .staging import Table, buckets, views


if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

logger = logging.getLogger(__name__)
SECONDS = 60.0  # the longest wait for other ranks
BUCKET_BYTES = 256 * 2**20  # most bytes of a broadcast with several tensors


class Group(Protocol):
    """The ranks of one transfer."""

    def start(self) -> None: ...  # waits for the other ranks to start, too
    def broadcast(self, tensor: torch.Tensor) -> None: ...  # sends bytes from rank 0; returns when they have arrived
    def close(self) -> None: ...


class Meeting:
    """A rank's access to the store, by which ranks wait for each other. `is_abandoned`: whether to stop waiting."""

    def __init__(self, store: TCPStore, rank: int, ranks: int, is_abandoned: Callable[[], bool] = lambda: False):
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self._is_abandoned = is_abandoned

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait until `is_done` returns True. `RuntimeError` after `SECONDS`, or if the transfer is abandoned."""
        end = time.monotonic() + SECONDS
        while not is_done():
            if self._is_abandoned():
                raise RuntimeError("the update failed otherwise.")
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{what} took longer than {SECONDS:g} seconds. If it stays so, set vllm_server_transport='auto'."
                )
            time.sleep(0.001)

    def meet(self, place: str, problem: str = "") -> None:
        """Wait until all ranks have called this for `place`. `RuntimeError` on all ranks if one has a `problem`."""
        self.store.set(f"{place} {self.rank}", problem or "none")
        names = [f"{place} {rank}" for rank in range(self.ranks)]
        self.wait(lambda: self.store.check(names), f"to wait for the other ranks of a broadcast ({place})")
        for rank, name in enumerate(names):
            found = self.store.get(name).decode()
            if found != "none":
                raise RuntimeError(f"rank {rank} of {self.ranks} takes no part in a broadcast: {found}")


class GlooGroup:
    """Ranks that broadcast tensors on the CPU."""

    def __init__(self, meeting: Meeting, own_address: str):
        self._meeting = meeting
        self._options = ProcessGroupGloo._Options()
        self._options._timeout = timedelta(seconds=SECONDS)
        # By default gloo tells other ranks the address of this host's name, often 127.0.1.1
        self._options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]

    def start(self) -> None:
        store = PrefixStore("gloo", self._meeting.store)
        self._group = ProcessGroupGloo(store, self._meeting.rank, self._meeting.ranks, self._options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        work = self._group.broadcast(tensor, 0)
        self._meeting.wait(work.is_completed, "a broadcast")
        work.wait()  # raises the broadcast's error

    def close(self) -> None:
        del self._group


class NcclGroup:
    """Ranks that broadcast tensors, each on a GPU of its own."""

    def __init__(self, meeting: Meeting, device: torch.device):
        from vllm.distributed.weight_transfer import nccl_common

        self._meeting = meeting
        self._device = device
        self._library = nccl_library()
        self._connect = nccl_common.uid_init_process_group
        self._stream = torch.cuda.Stream(device)

    def start(self) -> None:
        meeting = self._meeting
        name = "NCCL's identifier"  # its key in the store
        if meeting.rank == 0:
            meeting.store.set(name, bytes(self._library.ncclGetUniqueId()).hex())
        meeting.wait(lambda: meeting.store.check([name]), f"to wait for {name}")
        unique_id = bytes.fromhex(meeting.store.get(name).decode())
        # Connect by NCCL's identifier, because vLLM's other way unpickles what is in the store
        self._communicator = self._connect(unique_id, meeting.rank, meeting.ranks, self._device)

    def broadcast(self, tensor: torch.Tensor) -> None:
        with torch.cuda.device(tensor.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            self._communicator.broadcast(tensor, src=0, stream=self._stream)
            event = self._stream.record_event()
            self._meeting.wait(event.query, "a broadcast")

    def close(self) -> None:
        self._communicator.destroy()  # also ends a broadcast that other ranks have left


def nccl_library() -> "NCCLLibrary":
    """Return vLLM's binding of NCCL. Raises if NCCL is missing, or if vLLM's communicator would broadcast nothing."""
    from vllm import envs
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    if envs.VLLM_DISABLE_PYNCCL:
        raise RuntimeError("VLLM_DISABLE_PYNCCL switches vLLM's NCCL communicator off: remove it.")
    return NCCLLibrary()


@contextmanager
def preparing(meeting: Meeting) -> Iterator[None]:
    """Wait after the block until all ranks have left it. `RuntimeError` on all ranks if the block of a rank fails."""
    try:
        yield
    except Exception as error:  # tell the others, which would wait for this rank in NCCL's start
        meeting.meet("start", f"{type(error).__name__}: {error}")
        raise
    meeting.meet("start")


@contextmanager
def broadcasting(staged: torch.Tensor, table: Table, host: str, workers: int) -> Iterator[dict]:
    """Broadcast all tensors in a thread. Yield the arguments of `received`, which the block makes each worker call.

    `host`: the address by which workers reach this host. An error in the block ends the thread. `RuntimeError` after
    the block if the trainer's end failed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)  # 0: any free port
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    is_abandoned = threading.Event()
    meeting = Meeting(store, 0, workers + 1, is_abandoned.is_set)
    failures: list[str] = []  # texts: an exception, in a cycle of references, would keep the store's port open

    def send() -> None:
        try:
            with preparing(meeting):
                group = NcclGroup(meeting, staged.device) if staged.is_cuda else GlooGroup(meeting, host)
            group.start()
            with closing(group):
                for start, end, _ in buckets(table, BUCKET_BYTES):
                    group.broadcast(staged[start:end])
                meeting.meet("end")
        except Exception as error:
            failures.append(str(error) or type(error).__name__)

    sender = threading.Thread(target=send, daemon=True)  # NCCL's start may never return
    sender.start()
    try:
        yield {"host": host, "port": port, "ranks": meeting.ranks, "most_bytes": BUCKET_BYTES, "nccl": staged.is_cuda}
    except BaseException:
        if failures:
            logger.warning(f"the trainer's end of a broadcast to {workers} workers failed: {failures[0]}")
        is_abandoned.set()
        raise
    sender.join(SECONDS)  # the workers have everything, so it is about to end
    is_abandoned.set()
    if sender.is_alive() or failures:
        reason = failures[0] if failures else "it does not end"
        raise RuntimeError(f"the trainer's end of a broadcast failed: {reason}")


def received(
    table: Table, device: torch.device, rank: int, host: str, port: int, ranks: int, most_bytes: int, nccl: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, tensor)` as tensors arrive, in memory that later tensors reuse. `rank`: the rank of this worker.

    If the caller closes the iterator early, the iterator still takes part in the remaining broadcasts, in which the
    other ranks wait.
    """
    try:
        store = TCPStore(host, port, timeout=timedelta(seconds=SECONDS), wait_for_workers=False)
        own_address = address_towards(host, port)
    except Exception as error:
        raise RuntimeError(
            f"this worker does not reach the trainer at {host}, port {port} ({error}). Open such ports, or set "
            "vllm_server_transport='auto'."
        ) from error
    meeting = Meeting(store, rank, ranks)
    with preparing(meeting):
        parts = buckets(table, most_bytes)
        size = max((end - start for start, end, _ in parts), default=0)
        buffer = torch.empty(size, dtype=torch.uint8, device=device if nccl else "cpu")
        group = NcclGroup(meeting, device) if nccl else GlooGroup(meeting, own_address)
    group.start()
    with closing(group):
        left = iter(parts)
        try:
            for start, end, tensors in left:
                group.broadcast(buffer[: end - start])
                yield from views(buffer, tensors).items()
        except GeneratorExit:  # this worker has an error
            for start, end, _ in left:
                group.broadcast(buffer[: end - start])
            meeting.meet("end")
            raise
        meeting.meet("end")


def address_towards(host: str, port: int) -> str:
    """Return this host's address in a connection to `host`. `OSError` if nothing answers at its `port`."""
    with socket.create_connection((host, port), timeout=SECONDS) as connection:
        return connection.getsockname()[0]
