"""An engine that computes another model, made so on purpose in one of its own modules: found, and named."""

import pytest
import torch

from testing import engines
from testing.rollouts import calibrated, follow, witnessed
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.features.one_forward.same_model import Witness
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

LAYER = "model.layers.1"


@pytest.fixture(scope="module", params=["gemma2", "qwen3_moe"])
def synced(request, checkpoint):
    generation = engines.start(checkpoint(request.param), parts=[SharedKernelsPart()])
    engines.perturb(generation.model, seed=0)
    hook, scales = calibrated(generation, margin=4.0)
    forward = follow(generation, hook)
    hook.simulate(scales.values)
    yield request.param, generation, forward
    engines.shutdown(generation.llm)


def eps(layer, patch):
    patch.setattr(layer.input_layernorm, "variance_epsilon", 1e-5)
    return f"{LAYER}.input_layernorm: eps (output for rows whose mean square is"


def soft_cap(layer, patch):
    patch.setattr(layer.self_attn.attn.impl, "logits_soft_cap", None)
    return f"{LAYER}.self_attn: soft cap of scores (the policy's 4, the engine's none)"


def window(layer, patch):
    patch.setattr(layer.self_attn.attn, "sliding_window", 40)
    return f"{LAYER}.self_attn: window of attention (a query at position 40 sees 41 keys, the engine's 40)"


def scaling(layer, patch):
    patch.setattr(layer.self_attn.attn.impl, "scale", 0.13)
    return f"{LAYER}.self_attn: scaling of scores (the policy's"


def activation(layer, patch):
    patch.setattr(layer.mlp.act_fn, "approximate", "none")
    return f"{LAYER}.mlp: activation, act(gate) * up (error"


def gate_and_up(layer, patch):
    act = layer.mlp.act_fn.forward

    def swapped(x):
        return act(x.roll(x.shape[-1] // 2, -1))

    patch.setattr(layer.mlp.act_fn, "forward", swapped)
    return f"{LAYER}.mlp: activation, act(gate) * up (error"


def codes(layer, patch):
    weight = layer.self_attn.o_proj.weight
    patch.setattr(weight, "data", weight.data.flip(0))
    return f"{LAYER}.self_attn.o_proj: output (error"


def chosen(layer, patch):
    weight = layer.mlp.gate.weight
    patch.setattr(weight, "data", weight.data.roll(1, 0))
    return f"{LAYER}.mlp.gate: logits (error"


def experts(layer, patch):
    [weight] = [each for name, each in layer.mlp.named_parameters() if name.endswith("w2_weight")]
    patch.setattr(weight, "data", weight.data.roll(1, 0))
    return f"{LAYER}.mlp.experts: output (error"


BROKEN = {
    "gemma2": [eps, soft_cap, window, scaling, activation, gate_and_up, codes],
    "qwen3_moe": [eps, window, codes, chosen, experts],
}


def test_each_is_named(synced, subtests):
    architecture, generation, forward = synced
    model = engine_model(generation.llm).model
    assert not witnessed(forward, generation.model).differences
    for broken in BROKEN[architecture]:
        with subtests.test(broken.__name__), pytest.MonkeyPatch.context() as patch:
            expected = broken(model.layers[1], patch)
            found = witnessed(forward, generation.model).lines()
            assert len(found) == 1 and found[0].startswith(expected), found
    assert not witnessed(forward, generation.model).differences


def test_structure_of_a_policy_that_does_not_follow(synced):
    architecture, generation, forward = synced
    layers, kernels = engine_model(generation.llm).model.layers, forward.kernels
    forward.remove()
    with pytest.MonkeyPatch.context() as patch:
        table = layers[0].self_attn.rotary_emb.cos_sin_cache  # of all layers
        patch.setattr(table, "data", table.data.clone())
        table.data[50, 3] = 0.5
        eps(layers[1], patch)
        if architecture == "gemma2":
            activation(layers[0], patch)
        witness = Witness(generation.model, kernels, forward.hook, 64)
        with witness.watching():
            generation.model(input_ids=torch.tensor(engines.PROMPTS[-1:]))
    found = witness.findings.differences
    wrong = {f"model.layers.{n}.self_attn": "rotary angles (from position 50 on)" for n in range(2)}
    wrong[f"{LAYER}.input_layernorm"] = "eps (the policy's 1e-06, the engine's 1e-05)"
    if architecture == "gemma2":
        wrong["model.layers.0.mlp"] = found["model.layers.0.mlp"]
        assert found["model.layers.0.mlp"].startswith("activation, act(gate) * up (error ")
        soft_caps = {name: one for name, one in found.items() if "soft cap" in one}
        assert not soft_caps or generation.model.config._attn_implementation == "sdpa"
    assert found == wrong
