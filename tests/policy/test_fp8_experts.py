"""FP8 experts of the trained model against the formula, expert by expert, and their straight-through gradients."""

import pytest
import torch
import torch.nn.functional as F

from testing.quantization_counter import QuantizationCounter
from testing.tiny_models import build
from trl_fp8.policy.flow.experts import FP8ExpertModules
from trl_fp8.policy.flow.flow import FP8Flow
from trl_fp8.quantization.blockwise import dequantize_weight, quantize_activation, quantize_weight
from trl_fp8.quantization.formats.spec import ActivationScaling


NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def routed(tokens=9, experts=4, seed=0, dtype=torch.float32):
    """Hidden states, experts and gate weights; the last expert gets no token."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 128, generator=generator).to(dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(experts - 1, generator=generator)[:2] for _ in range(tokens)])
    return hidden, chosen, torch.rand(tokens, 2, generator=generator)


def by_expert(module, hidden, chosen, weights, flow):
    """The same, one token and one expert at a time."""

    def q(x):
        return dequantize_weight(quantize_activation(x.bfloat16(), flow.activation.scale_format), torch.float32)

    total = torch.zeros(hidden.shape)
    for token, (experts, gates) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, gate_weight in zip(experts, gates, strict=True):
            w13, w2 = (
                dequantize_weight(quantize_weight(w[expert].detach().bfloat16(), flow.scale_format), torch.float32)
                for w in (module.gate_up_proj, module.down_proj)
            )
            x = hidden[token : token + 1].detach()
            if flow.forward == "weights":
                gate, up = F.linear(x, w13).chunk(2, -1)
                total[token] += gate_weight * F.linear(F.silu(gate) * up, w2)[0]
                continue
            gate, up = F.linear(q(x), w13).bfloat16().chunk(2, -1)
            if flow.fused_activation:
                codes = quantize_activation(
                    F.silu(gate.float()) * up.float(), flow.activation.scale_format, amax_floor=1 / 512
                )
                inner = dequantize_weight(codes, torch.float32)
            else:
                inner = q(F.silu(gate) * up)
            total[token] += (gate_weight * F.linear(inner, w2)[0]).bfloat16()
    return total


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("forward", ["weights", "full"])
def test_a_layers_experts_compute_the_formula(forward, fused):
    flow = FP8Flow(forward=forward, activation=ActivationScaling("fp32"), fused_activation=fused)
    model = build("qwen3_moe")
    FP8ExpertModules.install(model, NAMES, flow)
    module = model.model.layers[0].mlp.experts
    hidden, chosen, weights = routed()
    found = module(hidden, chosen, weights)
    # GEMMs of other sizes add in another order; under "full" few of the 1152 sums fall on the other side of a rounding
    expected = by_expert(module, hidden, chosen, weights, flow)
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-6 if forward == "weights" else 2e-3)
    plain = build("qwen3_moe").model.layers[0].mlp.experts(hidden, chosen, weights)
    assert (found - plain).norm() / plain.norm() > 0.02  # quantization is an order above that


@pytest.mark.parametrize("forward", ["weights", "full"])
def test_gradients_are_those_of_unquantized_experts_at_the_same_activations(forward):
    """Straight through: with weights and inputs that e4m3 holds exactly, gradients are the plain layer's."""
    plain, twin = build("qwen3_moe"), build("qwen3_moe")
    for model in (plain, twin):
        experts = model.model.layers[0].mlp.experts
        with torch.no_grad():
            for weight in experts.parameters():
                weight.copy_(dequantize_weight(quantize_weight(weight.bfloat16()), torch.float32))
    flow = FP8Flow(forward=forward, activation=ActivationScaling("pow2"))
    FP8ExpertModules.install(twin, NAMES, flow)
    results = []
    for model in (plain, twin):
        module = model.model.layers[0].mlp.experts
        hidden, chosen, weights = routed()
        exact = dequantize_weight(quantize_activation(hidden.detach().bfloat16()), torch.float32).requires_grad_()
        weights.requires_grad_()
        module(exact, chosen, weights).square().sum().backward()
        results.append([exact.grad, module.gate_up_proj.grad, module.down_proj.grad, weights.grad])
    for ours, theirs in zip(results[1], results[0], strict=True):
        # under "full" the inner activations are still rounded, which moves gradients by about that rounding
        assert (ours - theirs).norm() / theirs.norm() < (1e-5 if forward == "weights" else 0.06)
    assert results[1][1][3].abs().sum() == 0  # an expert without tokens learns nothing, and is no NaN


def test_gradients_reach_a_master_weight_in_its_own_dtype_and_checkpointing_changes_nothing():
    grads = []
    for checkpointing in (False, True):
        model = build("qwen3_moe").train()
        FP8ExpertModules.install(model, NAMES, FP8Flow(activation=ActivationScaling("fp32")))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=torch.arange(4, 20)[None], use_cache=False).logits.float().square().mean()
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads[0].values())
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_weights_are_quantized_once_until_they_change(architecture, monkeypatch):
    model = build(architecture)
    installed = FP8ExpertModules.install(model, NAMES, FP8Flow())
    counter, tokens = QuantizationCounter(monkeypatch), torch.arange(4, 20)[None]
    assert counter.during(lambda: model(input_ids=tokens)) == 4  # two 3-D weights a layer, all experts at once
    assert counter.during(lambda: model(input_ids=tokens)) == 0
    experts = model.model.layers[1].mlp.experts
    codes, weight = experts.quantized_weight("down_proj"), experts.down_proj
    assert torch.equal(codes.scale, quantize_weight(weight.detach().bfloat16()).scale) and counter.calls == 4
    with torch.no_grad():
        weight.mul_(2)
    assert counter.during(lambda: model(input_ids=tokens)) == 1
    fresh = quantize_weight(weight.detach().bfloat16())
    installed.modules[NAMES[1]].keep(fresh, "down_proj")  # a sync's
    assert counter.during(lambda: model(input_ids=tokens)) == 0 and experts.quantized_weight("down_proj") is fresh
    weight.data.mul_(2)  # nobody can see this
    installed.invalidate()
    assert counter.during(lambda: model(input_ids=tokens)) == 4


def test_without_a_cache_nothing_is_kept(monkeypatch):
    model = build("qwen3_moe")
    FP8ExpertModules.install(model, NAMES, FP8Flow(cache_weights=False))
    counter, tokens = QuantizationCounter(monkeypatch), torch.arange(4, 20)[None]
    assert [counter.during(lambda: model(input_ids=tokens)) for _ in range(2)] == [4, 4]


def test_an_fp8_backward_of_experts_is_refused():
    with pytest.raises(ValueError, match=r"fp8_backward='fp8' with FP8 experts \(model.layers.0.mlp.experts"):
        FP8ExpertModules.install(build("qwen3_moe"), NAMES, FP8Flow(backward="fp8"))
