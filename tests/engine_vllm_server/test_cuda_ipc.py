"""A policy's way by CUDA IPC, as far as a host without a GPU has it: its handle, and what is refused."""

import json
import re
from inspect import signature

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from testing import tiny_models
from testing.fake_server import Server
from trl_fp8.engine.vllm_server import cuda_ipc
from trl_fp8.engine.vllm_server.cuda_ipc import exported, imported, opened_tensors, why_unreached
from trl_fp8.engine.vllm_server.staged_engine import StagedEngine
from trl_fp8.engine.vllm_server.staging import arranged, views
from trl_fp8.recipe.recipe import recipe_for_model


STAGED = torch.arange(200, dtype=torch.uint8)
# What torch's `_share_cuda_` returns on a GPU: an index, a handle, size, offset, and those of a counter and an event
SHARED = (3, b"\x00\xff" * 32, 512, 1024, b"/torch_1_2", 7, bytes(64), True)


def reduced(tensor):
    """Return what `reduce_tensor` returns for a tensor on a GPU."""
    kind = torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset(), torch.storage.TypedStorage
    return rebuild_cuda_tensor, (*kind, tensor.dtype, *SHARED[:4], tensor.requires_grad, *SHARED[4:])


def test_a_handle_is_plain_json_and_the_reader_rebuilds_from_the_same_arguments(monkeypatch):
    rebuilt = []
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", reduced)
    handle = json.loads(json.dumps(exported(STAGED[8:])))
    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", lambda **arguments: rebuilt.append(arguments))
    imported(handle, 5)
    [arguments] = rebuilt
    names = list(signature(rebuild_cuda_tensor).parameters)
    assert arguments.keys() == set(names)
    found = [arguments[name] for name in names]
    expected = list(reduced(STAGED[8:])[1])
    expected[names.index("storage_device")] = 5  # the reader's index of the GPU
    assert found == expected


def test_a_reader_finds_the_gpu_by_its_uuid_and_yields_each_tensor(monkeypatch):
    table, size = arranged({"codes": ("float8_e4m3fn", [10]), "scale": ("float32", [3])})
    monkeypatch.setattr(cuda_ipc, "gpu_index", {"GPU-a": 2}.get)
    monkeypatch.setattr(cuda_ipc, "imported", lambda handle, index: STAGED[:size] if index == 2 else None)
    found = dict(opened_tensors(table, {"gpu": "GPU-a"}))
    for name, tensor in views(STAGED, table).items():
        assert found[name].data_ptr() == tensor.data_ptr() and found[name].dtype == tensor.dtype
    with pytest.raises(RuntimeError, match="this worker does not see the trainer's GPU GPU-b"):
        list(opened_tensors(table, {"gpu": "GPU-b"}))


@pytest.mark.parametrize(
    "transport, gpu, device, reason",
    [
        ("cuda_ipc", "GPU-a", "cuda:0", ""),
        ("cuda_ipc", "GPU-a", "cuda:1", ""),
        ("cuda_ipc", "GPU-b", "cuda:0", "does not see the trainer's GPU GPU-b. Start the server where it does"),
        ("cuda_ipc", "GPU-b", "cuda:0", ".* or set 'broadcast'"),
        ("cuda_ipc", "GPU-b", "cpu", ".* or set 'auto'"),
        ("broadcast", "GPU-a", "cuda:1", ""),
        ("broadcast", "GPU-b", "cuda:0", ""),
        ("broadcast", "GPU-a", "cuda:0", "computes on the trainer's GPU.* Set 'cuda_ipc'"),
        ("broadcast", "GPU-b", "cpu", "has no GPU, which NCCL needs. Set 'auto'"),
        ("broadcast", "", "cpu", ""),
        ("broadcast", "", "cuda:0", ""),
    ],
)
def test_a_worker_says_why_a_transport_does_not_reach_it(transport, gpu, device, reason, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "gpu_index", {"GPU-a": 0}.get)
    found = why_unreached(transport, gpu, torch.device(device))
    assert re.match(reason, found) and bool(found) == bool(reason)


def test_a_worker_that_a_transport_does_not_reach_is_refused_at_the_start(tmp_path):
    policy = tiny_models.build()
    recipe = recipe_for_model(policy)
    server = Server(policy, recipe)
    server.unreached = "does not see the GPU"
    with pytest.raises(ValueError, match="vllm_server_transport='cuda_ipc': worker 0 of http://server does not see"):
        StagedEngine([server], policy, recipe, str(tmp_path), 1, transport="cuda_ipc")
    StagedEngine([server], policy, recipe, str(tmp_path), 1)
