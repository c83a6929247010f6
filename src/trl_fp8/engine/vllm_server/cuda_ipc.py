"""A policy's bytes on a GPU, which the workers of a server on the same host open by CUDA IPC.

The handle travels as JSON; vLLM's own IPC transfer sends pickled objects. This module has never run on a GPU.
"""

from collections.abc import Iterator
from inspect import signature

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from .staging import Table, views


# Parameters of `rebuild_cuda_tensor` that travel in a handle: those of bytes as hex digits, and numbers. `tensor_size`
# and `storage_device` follow from "bytes" and "gpu" of the handle; the other parameters are constants
HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")
NUMBERS = ("tensor_offset", "storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required")


def gpu_of(tensor: torch.Tensor) -> str:
    """Return the UUID of a tensor's GPU; empty for the CPU."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid) if tensor.is_cuda else ""


def gpu_index(gpu: str) -> int | None:
    """Return the index that a GPU has in this process; None if the process does not see it."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu:
            return index
    return None


def why_unreached(transport: str, gpu: str, device: torch.device) -> str:
    """Return why `transport` brings no policy to the worker on `device`, and the remedy; empty if it brings one.

    `gpu`: the UUID of the trainer's GPU; empty if the policy is on a CPU.
    """
    index = gpu_index(gpu)
    if transport == "cuda_ipc" and index is None:
        other = "broadcast" if device.type == "cuda" else "auto"
        return f"does not see the trainer's GPU {gpu}. Start the server where it does, or set {other!r}"
    if transport == "broadcast" and gpu and device.type != "cuda":
        return "has no GPU, which NCCL needs. Set 'auto'"
    if transport == "broadcast" and index is not None and index == device.index:
        return "computes on the trainer's GPU, and NCCL allows only one rank per GPU. Set 'cuda_ipc'"
    return ""


def exported(staged: torch.Tensor) -> dict:
    """Return a handle of a buffer of bytes on a GPU. Each reader needs a call of its own: torch counts the calls."""
    _, arguments = reduce_tensor(staged)
    by_name = dict(zip(signature(rebuild_cuda_tensor).parameters, arguments, strict=True))
    handle = {"gpu": gpu_of(staged), "bytes": staged.numel()}
    for name in NUMBERS:
        handle[name] = by_name[name]
    for name in HANDLES:
        handle[name] = by_name[name].hex()
    return handle


def imported(handle: dict, index: int) -> torch.Tensor:
    """Return the other process's buffer that a handle refers to. `index`: the index of its GPU in this process."""
    arguments = {name: handle[name] for name in NUMBERS}
    for name in HANDLES:
        arguments[name] = bytes.fromhex(handle[name])
    return rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=(handle["bytes"],),
        tensor_stride=(1,),
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        storage_device=index,
        requires_grad=False,
        **arguments,
    )


def opened_tensors(table: Table, handle: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, tensor)`, views of the trainer's memory. The trainer writes there again only after this worker has
    answered `fp8_state`.
    """
    index = gpu_index(handle["gpu"])
    if index is None:
        raise RuntimeError(f"this worker does not see the trainer's GPU {handle['gpu']}.")
    yield from views(imported(handle, index), table).items()
