"""What a GPU is given to do for each attention call, counted."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl_fp8.features.kv_cache.observation import QKVObservation
from trl_fp8.quantization.codec import e4m3
from trl_fp8.quantization.codec.e4m3 import cache_round_trip
from trl_fp8.quantization.kernels import cache_kernels


CPU = torch.device("cpu")


@contextmanager
def launches(monkeypatch) -> Iterator[list[str]]:
    """Names of Triton kernels, and of operators of torch that compute."""
    launched = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if not operator.is_view and not operator._opname.startswith("empty"):
                launched.append(operator._opname)
            return operator(*args, **(kwargs or {}))

    class Kernel:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args: launched.append(self.name)

    for name in ("_add_magnitudes", "_round_trip"):
        monkeypatch.setattr(cache_kernels, name, Kernel(name))
    with Operators():
        yield launched


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Tensors say that they are, and stay where they are."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(e4m3, "casts_in_hardware", lambda device: True)
    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, lambda device: device)


def states() -> list[torch.Tensor]:
    """q, k, v as transformers has them: views of `[B, T, H, D]`."""
    return [torch.ones(3, 16, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 2, 2)]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_observing_a_layer_is_a_kernel_for_each_of_q_k_v(monkeypatch, masked, counted):
    scales = torch.ones(4, 3) if counted else None
    observation = QKVObservation(4, CPU, scales_L3=scales)
    real_BT = torch.ones(3, 16, dtype=torch.bool) if masked else None
    qkv = states()
    with launches(monkeypatch) as launched:
        observation.add(1, tuple(qkv), real_BT, 0.125)
    assert launched == ["_add_magnitudes"] * 3


def test_mean_squares_are_operators_of_torch(monkeypatch):
    observation, qkv = QKVObservation(4, CPU, moments=True), states()
    with launches(monkeypatch) as launched:
        observation.add(1, tuple(qkv), None, 0.125)
    assert launched.count("_add_magnitudes") == 3 and len(launched) > 10


def test_a_simulated_cache_is_one_kernel(monkeypatch):
    key, scales = states()[1].requires_grad_(), torch.ones(4, 3)
    with launches(monkeypatch) as launched:
        read = cache_round_trip(key, scales[2].unbind()[1])
    assert launched == ["_round_trip"]
    assert read.shape == key.shape and read.stride() == key.stride() and read.dtype == key.dtype
    gradient = torch.empty_like(read)
    assert torch.autograd.grad(read, key, gradient)[0] is gradient
