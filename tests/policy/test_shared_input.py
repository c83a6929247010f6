"""Q(x) is made once for the layers that read x, which changes no bit, and is not kept."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from testing import tiny_models
from trl_fp8.policy.flow.flow import FP8Flow
from trl_fp8.policy.flow.linear import FP8Linears, SharedInput
from trl_fp8.recipe.recipe import recipe_for_model


IDS = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def counted(monkeypatch):
    calls, original = [], FP8Flow.quantize_input

    def counted(flow, x, parts=1):
        calls.append(x.shape)
        return original(flow, x, parts)

    monkeypatch.setattr(FP8Flow, "quantize_input", counted)
    return calls


def installed(**flow):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_models.config())
    return model, FP8Linears.install(model, recipe_for_model(model).fp8_modules, FP8Flow(**flow))


def held(linears):
    return [linear._shared_input._codes for linear in linears.modules.values() if linear._shared_input]


def step(model):
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
def test_four_quantizations_a_layer_instead_of_seven_and_the_same_bits(backward, counted):
    model, linears = installed(backward=backward)
    loss, gradients = step(model)
    assert len(counted) == 2 * 4  # q k v, o, gate up, down
    assert held(linears) == [None] * 2 * 5  # nothing is kept for the next step
    for linear in linears.modules.values():
        linear._shared_input = None
    alone, expected = step(model)
    assert len(counted) == 2 * 4 + 2 * 7
    assert torch.equal(loss, alone) and all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_gradient_checkpointing_and_autocast_share_too(counted):
    model, linears = installed()
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    again = step(model)
    assert torch.equal(again[0], expected[0]) and all(torch.equal(again[1][n], g) for n, g in expected[1].items())
    assert len(counted) <= 3 * 8
    counted.clear()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model.eval()(IDS)
    assert len(counted) == 8


def test_an_input_that_changed_or_is_another_one_is_quantized_anew():
    shared, flow, x = SharedInput(3), FP8Flow(), torch.randn(4, 128)
    first = shared.quantized(x, flow.quantize_tokens)
    assert shared.quantized(x, flow.quantize_tokens) is first
    x.mul_(2)
    second = shared.quantized(x, flow.quantize_tokens)
    assert second is not first and torch.equal(second.scale, 2 * first.scale)
    assert shared.quantized(x.clone(), flow.quantize_tokens) is not second
    with torch.inference_mode():  # where changes are not counted
        y = torch.randn(4, 128)
        assert shared.quantized(y, flow.quantize_tokens) is not shared.quantized(y, flow.quantize_tokens)


def test_weights_only_flows_quantize_no_input(counted):
    model, _ = installed(forward="weights")
    step(model)
    assert counted == []
