"""A device whose kernels compute something else is refused, by what it gets wrong. The meta device plays the GPU."""

import re

import pytest
import torch

from trl_fp8.quantization.codec import kernel_check
from trl_fp8.quantization.codec.e4m3 import casts_in_hardware


@pytest.fixture
def wrong_by_one(monkeypatch):
    """`wrong_by_one(name)`: the device's results are those of CPU but for that of `name`; None: all of them are."""

    def play(name):
        computed, original = {}, kernel_check.results

        def results(sample):
            if sample.device.type == "cpu":
                computed.update(original(sample))
                return computed
            return computed | ({name: computed[name] + 1} if name else {})

        monkeypatch.setattr(kernel_check, "results", results)

    return play


@pytest.mark.parametrize("name", ["checksum", "weights (pow2)", "scales of activations (fp32)", "weights in place"])
def test_a_device_that_computes_something_else_is_refused(name, wrong_by_one):
    wrong_by_one(name)
    with pytest.raises(RuntimeError, match=f"on meta, Triton .* for: {re.escape(name)}\\."):
        kernel_check.require_exact_kernels(torch.device("meta"))


def test_a_device_that_computes_the_same_is_taken(wrong_by_one):
    wrong_by_one(None)
    kernel_check.require_exact_kernels(torch.device("meta"))


@pytest.mark.parametrize(
    ("capability", "hip", "taken"), [((8, 6), None, False), ((8, 9), None, True), ((9, 4), "6.4", False)]
)
def test_other_gpus_quantize_with_torch(capability, hip, taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert casts_in_hardware(torch.device("cuda")) is taken


@pytest.mark.gpu
def test_this_gpu_is_taken():
    kernel_check.require_exact_kernels(torch.device("cuda"))
