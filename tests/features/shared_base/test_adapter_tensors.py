"""What an engine is sent of a policy with adapters: those of the one that is active, and what merging them gives."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from trl_fp8.features.shared_base.adapter_tensors import (
    A,
    B,
    Slot,
    adapter_ranks,
    adapter_tensors,
    factors,
    with_adapters,
)


@pytest.fixture
def model():
    """Layer "0" has both adapters, "1" has "other" alone."""
    layers = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))
    config = {"lora_alpha": 3, "init_lora_weights": False}
    made = get_peft_model(layers, LoraConfig(r=3, target_modules=["0"], **config), adapter_name="mine")
    made.add_adapter("other", LoraConfig(r=4, target_modules=["0", "1"], use_rslora=True, **config))
    return made


def matrix(model, layer, which, adapter):
    return model.get_parameter(f"base_model.model.{layer}.{which}.{adapter}.weight").detach()


@pytest.mark.parametrize("active, layers, rank, scaling", [("mine", ["0"], 3, 1), ("other", ["0", "1"], 4, 3 / 2)])
def test_the_active_adapter_is_sent_and_merged_and_no_other(active, layers, rank, scaling, model):
    model.set_adapter(active)
    assert adapter_ranks(model) == {"0": 4, "1": 4}
    slots = {"0": Slot(4, 0, 1, (5, 6), 4), "1": Slot(4, 0, 1, (3, 5), 4)}
    sent = dict(adapter_tensors(model, slots, model.named_parameters()))
    both = factors(model, model.named_parameters())
    assert sorted(both) == layers
    for layer in slots:
        a, b = sent[f"{layer}.{A}.weight"], sent[f"{layer}.{B}.weight"]
        if layer not in layers:
            assert not a.any() and not b.any()
            continue
        assert torch.equal(a[:rank], matrix(model, layer, A, active)) and not a[rank:].any()
        assert torch.equal(b[:, :rank], scaling * matrix(model, layer, B, active)) and not b[:, rank:].any()
        assert torch.equal(both[layer][A], a[:rank]) and torch.equal(both[layer][B], b[:, :rank])
    weights = {f"{layer}.weight": model.get_parameter(f"base_model.model.{layer}.base_layer.weight") for layer in "01"}
    sums = dict(with_adapters(weights.items(), both))
    model.merge_adapter()
    for name, weight in weights.items():
        assert (sums[name] - weight).abs().max() <= 2**-22 * weight.abs().max()  # two FP32 sums of four products
