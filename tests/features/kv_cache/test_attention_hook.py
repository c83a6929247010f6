"""The hook sees and changes exactly what attention sees, and leaves no trace on the model.

Two oracles that share no code with it: `projected` recomputes q, k, v from the projections with the model's own RoPE,
and `Attention` takes the place of the attention function in the model (the entry in transformers' table for sdpa, the
function in the model's file for eager), where it records what it gets and hands on what a test wants.
"""

import copy
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from testing import other_models, tiny_models
from trl_fp8.features.kv_cache.observation import QKVObservation
from trl_fp8.policy.hook import AttentionHook, hook_of, hooked
from trl_fp8.policy.model import transformers_model
from trl_fp8.quantization.codec.kv_scales import E4M3_RELATIVE_ERROR, kv_scales_from_amax


SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]
ARCHITECTURES = ["qwen3", "qwen2", "llama", "qwen3_moe"]
SLIDING = dict(
    use_sliding_window=True,
    sliding_window=2,
    max_window_layers=1,
    layer_types=["full_attention", "sliding_attention"],
)


def build(architecture="qwen3", implementation="sdpa", **overrides):
    if architecture == "mistral":
        overrides["sliding_window"] = 2
    return tiny_models.build(architecture, attn_implementation=implementation, **overrides)


def gemma3n(implementation) -> Gemma3nForCausalLM:
    """Four layers, of which the last two read the k and v of the first two."""
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        altup_num_inputs=2,
        num_kv_shared_layers=2,
        sliding_window=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        attn_implementation=implementation,
    )
    return Gemma3nForCausalLM(config).eval()


def batch(sequences=SEQUENCES, side="right", pad=0) -> dict[str, torch.Tensor]:
    length = max(map(len, sequences))
    ids, mask = torch.full((len(sequences), length), pad), torch.zeros(len(sequences), length, dtype=torch.long)
    for row, ids_of in enumerate(sequences):
        where = slice(len(ids_of)) if side == "right" else slice(length - len(ids_of), None)
        ids[row, where], mask[row, where] = torch.tensor(ids_of), 1
    return {"input_ids": ids, "attention_mask": mask}


def projected(model, sequences=SEQUENCES) -> list[list[tuple[torch.Tensor, ...]]]:
    """q, k, v `[H, T, D]` by layer and sequence, of one sequence at a time without padding."""
    layers = model.model.layers
    states = [[] for _ in layers]
    for ids in sequences:
        inputs = {}
        handles = [
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, seen=inputs, index=index: seen.__setitem__(index, kwargs),
                with_kwargs=True,
            )
            for index, layer in enumerate(layers)
        ]
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]))
            for index, layer in enumerate(layers):
                attention, hidden = layer.self_attn, inputs[index]["hidden_states"]
                shape = (1, len(ids), -1, attention.head_dim)
                q, k = attention.q_proj(hidden).view(shape), attention.k_proj(hidden).view(shape)
                if hasattr(attention, "q_norm"):
                    q, k = attention.q_norm(q), attention.k_norm(k)
                q, k = apply_rotary_pos_emb(
                    q.transpose(1, 2), k.transpose(1, 2), *inputs[index]["position_embeddings"]
                )
                states[index].append((q[0], k[0], attention.v_proj(hidden).view(shape)[0].transpose(0, 1)))
        for handle in handles:
            handle.remove()
    return states


def amax_of(states) -> torch.Tensor:
    return torch.tensor([[max(s[c].abs().max().item() for s in layer) for c in range(3)] for layer in states])


class Attention:
    """What attention was called with, by layer, most recent call; `change(layer, q, k, v)` stands in front of it."""

    def __init__(self, change: Callable | None = None):
        self.change, self.qkv = change, {}

    def wrap(self, attend: Callable) -> Callable:
        def attention(module, *args, **kwargs):
            states, rest = args[:3], args[3:]
            self.qkv[module.layer_idx] = tuple(tensor.detach() for tensor in states)
            if self.change is not None:
                states = self.change(module.layer_idx, *states)
            return attend(module, *states, *rest, **kwargs)

        return attention


@contextmanager
def attention_of(model, change: Callable | None = None):
    """Put an `Attention` into the model, which may be hooked inside the block."""
    attention, implementation = Attention(change), model.config._attn_implementation
    if implementation == "eager":
        file = sys.modules[type(model).__module__]
        original = file.eager_attention_forward
        file.eager_attention_forward = attention.wrap(original)
        try:
            yield attention
        finally:
            file.eager_attention_forward = original
    else:
        assert implementation == "sdpa"
        AttentionInterface.register("oracle", attention.wrap(sdpa_attention_forward))
        AttentionMaskInterface.register("oracle", sdpa_mask)
        model.set_attn_implementation("oracle")
        try:
            yield attention
        finally:
            model.set_attn_implementation(implementation)
            AttentionInterface._global_mapping.pop("oracle")
            AttentionMaskInterface._global_mapping.pop("oracle")


def cached(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The round trip as torch's cast makes it;
    tests/quantization/test_fake_quant.py has the bytes from first principles.
    """
    return ((x.bfloat16().float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def straight_through(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x + (cached(x.detach(), scale) - x.detach())


def observe(hook, model, inputs, **options) -> QKVObservation:
    with torch.no_grad(), hook.observing(QKVObservation(hook.layers, hook.device, **options)) as observation:
        model(**inputs)
    return observation


def logits(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def some_scales(model, margin=1.0) -> torch.Tensor:
    return kv_scales_from_amax(amax_of(projected(model)), margin).values


def fingerprint(model) -> dict:
    """Attributes and hooks of every module, and what transformers would write down."""
    modules = {
        name: (sorted(vars(module)), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    }
    return {
        "modules": modules,
        "implementation": model.config._attn_implementation,
        "config": model.config.to_dict(),
        "state": list(model.state_dict()),
    }


# A q, k or v is a chain of at most six fp32 matmuls over 64 to 256 terms;
# another order of summation moves each by up to 256 * 2**-24 = 1.5e-5 of itself.
REORDERED = 1e-4


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mistral", "qwen3_sliding"])
def test_observes_what_attention_sees(architecture, implementation):
    if architecture == "qwen3_sliding":
        model = build("qwen3", implementation, **SLIDING)
    else:
        model = build(architecture, implementation)
    expected = projected(model)
    observed = observe(AttentionHook(model), model, batch())
    torch.testing.assert_close(observed.amax_L3, amax_of(expected), rtol=REORDERED, atol=0)
    per_token = [tensor.shape[0] * tensor.shape[2] for tensor in expected[0][0]]
    assert per_token[1] == per_token[2]
    assert observed.elements_L3.tolist() == [[13.0 * elements for elements in per_token]] * 2


def test_the_sliding_window_matters_to_these_inputs():
    sliding, full = build(**SLIDING), build()
    assert not torch.equal(logits(sliding, batch()), logits(full, batch()))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_layers_that_share_kv_are_observed_and_rounded_like_their_source(implementation):
    model = gemma3n(implementation)
    inputs = {"input_ids": torch.tensor(SEQUENCES[:1])}
    with attention_of(model) as attention:
        plain = logits(model, inputs)
        seen = attention.qkv
        hook = AttentionHook(model)
        observed = observe(hook, model, inputs)
        expected = torch.tensor([[t.abs().max().item() for t in seen[layer]] for layer in range(4)])
        assert torch.equal(observed.amax_L3, expected)
        assert torch.equal(observed.amax_L3[2:, 1:], observed.amax_L3[:2, 1:])
        scales = kv_scales_from_amax(observed.amax_L3).values
        hook.simulate(scales)
        hooked = logits(model, inputs)
        assert torch.equal(attention.qkv[2][1], attention.qkv[0][1])  # rounded twice under one scale is rounded once
        hook.remove()
    with attention_of(model, lambda i, q, k, v: (q, cached(k, scales[i, 1]), cached(v, scales[i, 2]))):
        assert torch.equal(logits(model, inputs), hooked)
    assert not torch.equal(plain, hooked)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saturated_elements_are_counted(architecture):
    model = build(architecture)
    expected, limits, counts = projected(model), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)
    for layer, states in enumerate(expected):
        for column in range(3):
            values = torch.cat([s[column].abs().flatten() for s in states]).sort(descending=True).values
            rank = 3 + (values[3:40] / values[4:41]).argmax().item()  # a gap that reordered sums do not cross
            assert values[rank] / values[rank + 1] > 1 + 10 * REORDERED
            limits[layer, column] = (values[rank] + values[rank + 1]) / 2
            counts[layer, column] = (values > limits[layer, column]).sum() if column else 0  # q is not cached
    hook = AttentionHook(model)
    observed = observe(hook, model, batch(), scales_L3=limits / 448)
    assert torch.equal(observed.saturated_L3, counts) and (counts[:, 1:] >= 4).all()
    assert torch.equal(observed.saturated_fraction_L3, (counts / observed.elements_L3).float())
    assert observe(hook, model, batch(), scales_L3=limits).saturated_L3.sum() == 0
    assert observe(hook, model, batch()).saturated_fraction_L3.sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_figures_of_a_batch_are_exact_and_the_limit_itself_is_not_saturated(implementation, dtype):
    model, inputs = build("qwen2", implementation).to(dtype), batch(side="left")
    real = inputs["attention_mask"].bool()
    positions = (real.long().cumsum(-1) - 1).clamp_min(0)
    with attention_of(model) as attention:
        logits(model, inputs | {"position_ids": positions})
        states = [[x.float().transpose(1, 2)[real].abs() for x in attention.qkv[layer]] for layer in range(2)]
        limits = torch.stack([torch.stack([x.flatten().sort().values[-9] for x in layer]) for layer in states])
        hook = AttentionHook(model)
        observation = QKVObservation(2, hook.device, scales_L3=limits / 448)
        observation.limits_L3 = limits  # 448 * (x / 448) need not be x
        with hook.observing(observation):
            logits(model, inputs)
        hook.remove()
    assert torch.equal(observation.amax_L3, torch.stack([torch.stack([x.max() for x in layer]) for layer in states]))
    beyond = [
        [(x > limit).sum().item() for x, limit in zip(*pair, strict=True)] for pair in zip(states, limits, strict=True)
    ]
    assert observation.saturated_L3[:, 1:].tolist() == [counts[1:] for counts in beyond]
    assert all(1 <= count <= 8 for counts in beyond for count in counts)
    assert observation.elements_L3.tolist() == [[float(x.numel()) for x in layer] for layer in states]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logit_error_is_that_of_the_real_tokens(architecture):
    model = build(architecture)
    expected = []
    for states in projected(model):
        q, k = (torch.cat([s[column] for s in states], 1).double().square().mean(1) for column in (0, 1))
        group = q.shape[0] // k.shape[0]
        heads = [(q[head] * k[head // group]).sum().sqrt().item() for head in range(q.shape[0])]
        expected.append(E4M3_RELATIVE_ERROR * 64**-0.5 * max(heads))
    observed = observe(AttentionHook(model), model, batch(), moments=True).logit_error_L
    torch.testing.assert_close(observed, torch.tensor(expected), rtol=REORDERED, atol=0)


@pytest.mark.parametrize("scaling", [0.5, None])
def test_logit_error_takes_the_scaling_that_attention_gets(scaling):
    model = build()
    hook = AttentionHook(model)
    ordinary = observe(hook, model, batch(), moments=True).logit_error_L
    for layer in model.model.layers:
        layer.self_attn.scaling = scaling
    changed = observe(hook, model, batch(), moments=True).logit_error_L
    factor = 1.0 if scaling is None else scaling * 64**0.5  # None: attention's default, 1 / sqrt(D)
    torch.testing.assert_close(changed[0], factor * ordinary[0], rtol=1e-6, atol=0)


def test_observations_add_up_over_forwards():
    model = build()
    hook, limits = AttentionHook(model), dict(scales_L3=torch.full((2, 3), 1.0 / 448), moments=True)
    apart = [observe(hook, model, batch([ids]), **limits) for ids in SEQUENCES[:2]]
    with hook.observing(QKVObservation(2, hook.device, **limits)) as together:
        for ids in SEQUENCES[:2]:
            logits(model, batch([ids]))
    assert torch.equal(together.amax_L3, torch.maximum(*(o.amax_L3 for o in apart)))
    assert torch.equal(together.logit_error_L, torch.maximum(*(o.logit_error_L for o in apart)))
    assert torch.equal(together.elements_L3, apart[0].elements_L3 + apart[1].elements_L3)
    assert torch.equal(together.saturated_L3, apart[0].saturated_L3 + apart[1].saturated_L3)
    assert together.saturated_L3[:, 1:].min() > 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_observed(side):
    model = build()
    with torch.no_grad():
        attention = model.model.layers[0].self_attn  # a token along a row of W gives the largest W x
        model.model.embed_tokens.weight[0] = attention.k_proj.weight[3] + attention.v_proj.weight[5]
    hook, options = AttentionHook(model), dict(scales_L3=torch.full((2, 3), 1.0 / 448), moments=True)
    loud, quiet = (observe(hook, model, batch(side=side, pad=pad), **options) for pad in (0, 60))
    for name in ("amax_L3", "logit_error_L", "saturated_L3", "elements_L3"):
        assert torch.equal(getattr(loud, name), getattr(quiet, name)), name
    everything = batch(side=side) | {"attention_mask": torch.ones(3, 6, dtype=torch.long)}
    observed = observe(hook, model, everything, **options)
    assert (observed.amax_L3[0, 1:] > 1.5 * quiet.amax_L3[0, 1:]).all()
    assert (observed.elements_L3 == quiet.elements_L3 / 13 * 18).all()


def test_without_a_mask_every_token_is_real():
    model = build()
    hook, ids = AttentionHook(model), torch.tensor([[5, 6, 7], [8, 9, 10]])
    masked = observe(hook, model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert torch.equal(observe(hook, model, {"input_ids": ids}).elements_L3, masked.elements_L3)
    # a mask of an earlier forward is not kept
    logits(model, batch([[5, 6, 7], [8]]))
    assert torch.equal(observe(hook, model, {"input_ids": ids}).elements_L3, masked.elements_L3)


def test_nan_is_observed():
    model = build()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[5, 7] = float("nan")
    observed = observe(AttentionHook(model), model, batch()).amax_L3
    assert observed.isnan().tolist() == [[False, False, False], [False, False, True]]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
def test_no_trace_after_removal_and_no_effect_while_idle(architecture, implementation):
    model = build(architecture, implementation)
    before, plain = fingerprint(model), logits(model, batch())
    hook = AttentionHook(model)
    assert torch.equal(logits(model, batch()), plain)
    observe(hook, model, batch(), moments=True)
    assert hook.observer is None
    assert torch.equal(logits(model, batch()), plain)
    hook.simulate(torch.ones(2, 3))
    assert not torch.equal(logits(model, batch()), plain)
    hook.remove()
    assert fingerprint(model) == before
    assert torch.equal(logits(model, batch()), plain)
    assert all(parameter.grad is None for parameter in model.parameters())
    again = AttentionHook(model)
    assert (observe(again, model, batch()).amax_L3 > 0).all()


def test_a_policy_has_one_hook_which_whoever_installed_it_keeps():
    model = build()
    before, policy = fingerprint(model), get_peft_model(build(), LoraConfig(target_modules=["q_proj"]))
    with hooked(model) as hook:
        assert hook_of(model) is hook
        with hooked(model) as again:
            assert again is hook
        assert hook_of(model) is hook
    assert fingerprint(model) == before
    assert hook_of(model) is not hook
    assert hook_of(policy) is hook_of(policy.get_base_model()) is not hook_of(model)


@pytest.mark.parametrize("language, vision", [("sdpa", "eager"), ("eager", "sdpa")])
def test_a_vision_tower_keeps_its_attention(language, vision):
    """While the language model is watched, and afterwards."""
    model = other_models.policy("gemma3").eval()
    model.set_attn_implementation({"text_config": language, "vision_config": vision})
    parts, hook, calls = (model.config.text_config, model.config.vision_config), AttentionHook(model), []
    ids = torch.tensor([[5, 6, 7]])
    plain = model(input_ids=ids).logits
    with hook.watched(lambda *call: calls.append(call)):
        assert parts[1]._attn_implementation == vision
        model(input_ids=ids)
    assert len(calls) == hook.layers and parts[1]._attn_implementation == vision
    assert torch.equal(model(input_ids=ids).logits, plain)
    hook.remove()
    assert tuple(part._attn_implementation for part in parts) == (language, vision)


def test_observation_ends_with_an_error():
    model = build()
    hook = AttentionHook(model)

    def fail(module, args):
        raise RuntimeError("forward broke")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="forward broke"):
        observe(hook, model, batch())
    handle.remove()
    assert hook.observer is None
    assert (observe(hook, model, batch()).amax_L3 > 0).all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("config", ["own", "shared"])
def test_other_models_are_unaffected(implementation, config):
    model, other = build(implementation=implementation), build(implementation=implementation)
    if config == "shared":
        other = type(model)(model.config)
        other.load_state_dict(model.state_dict())
        other.eval()
    plain = logits(other, batch())
    hook = AttentionHook(model)
    hook.simulate(torch.ones(2, 3))
    with hook.observing(QKVObservation(2, hook.device)) as observation:
        assert torch.equal(logits(other, batch()), plain)
        assert observation.elements_L3.sum() == 0
    assert not torch.equal(logits(model, batch()), plain)
    hook.remove()
    assert torch.equal(logits(other, batch()), plain)


@pytest.mark.parametrize("before,after", [("sdpa", "eager"), ("eager", "sdpa"), ("eager", "eager")])
def test_a_hook_follows_a_change_of_the_attention_implementation(before, after):
    model = build(implementation=before)
    hook = hook_of(model)
    assert hook_of(model) is hook
    with hook.watched(lambda *_: None):
        assert hook_of(model) is hook  # it chose eager attention itself
    model.set_attn_implementation(after)
    plain, simulated = (build(implementation=after) for _ in range(2))
    hook_of(simulated).simulate(torch.ones(2, 3))
    hook.simulate(torch.ones(2, 3))
    assert torch.equal(logits(model, batch()), logits(simulated, batch()))
    plain = logits(plain, batch())
    assert not torch.equal(logits(model, batch()), plain)
    assert hook_of(model) is hook and hook.implementation == after
    model.set_attn_implementation(before)
    assert hook_of(model).implementation == before
    model.set_attn_implementation(after)
    hook.remove()
    assert model.config._attn_implementation == after
    assert torch.equal(logits(model, batch()), plain)


def test_a_model_made_from_a_hooked_models_config_is_observed_once():
    first = build(implementation="eager")
    hook = AttentionHook(first)
    expected = observe(hook, first, batch()).elements_L3
    second = type(first)._from_config(first.config)
    assert torch.equal(observe(AttentionHook(second), second, batch()).elements_L3, expected)
    assert torch.equal(observe(hook, first, batch()).elements_L3, expected)


def test_two_hooked_models_do_not_mix():
    first, second = build("qwen3"), build("llama")
    hooks = [AttentionHook(first), AttentionHook(second)]
    hooks[0].scales_L3 = torch.ones(2, 3)
    plain = build("llama")
    assert torch.equal(logits(second, batch()), logits(plain, batch()))
    hooks[0].remove()
    assert (observe(hooks[1], second, batch()).elements_L3 > 0).all()


@pytest.mark.parametrize("query", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mistral"])
def test_attention_reads_what_the_cache_holds(architecture, implementation, query):
    model = build(architecture, implementation)
    inputs = {"input_ids": torch.tensor([SEQUENCES[0]])}
    # small enough to saturate q, k and v differently: a power of two up only moves where subnormals begin
    scales = some_scales(model) * torch.tensor([1.0, 1 / 2, 1 / 8])

    def round_trip(layer, q, k, v):
        q_scale, k_scale, v_scale = scales[layer].tolist()
        return cached(q, q_scale) if query else q, cached(k, k_scale), cached(v, v_scale)

    plain = logits(model, inputs)
    with attention_of(model, round_trip):
        expected = logits(model, inputs)
    hook = AttentionHook(model)
    hook.simulate(scales)
    hook.round_queries(query)
    hooked = logits(model, inputs)
    assert torch.equal(hooked, expected)
    assert not torch.equal(hooked, plain)
    hook.round_queries(not query)
    assert not torch.equal(logits(model, inputs), expected)
    hook.round_queries(query)
    hook.simulate(scales[:, [0, 2, 1]])
    assert not torch.equal(logits(model, inputs), expected)


@pytest.mark.parametrize("skipped", [{0}, {1}])
def test_skip_layers_are_left_alone_but_observed(skipped):
    model = build()
    scales, inputs = some_scales(model), {"input_ids": torch.tensor([SEQUENCES[0]])}

    def round_trip(layer, q, k, v):
        if layer in skipped:
            return q, k, v
        return cached(q, scales[layer, 0]), cached(k, scales[layer, 1]), cached(v, scales[layer, 2])

    with attention_of(model, round_trip):
        expected = logits(model, inputs)
    hook = AttentionHook(model, skipped)
    hook.simulate(scales)
    hook.round_queries(True)
    assert torch.equal(logits(model, inputs), expected)
    assert (observe(hook, model, inputs).amax_L3 > 0).all()
    hook.skip(())
    assert not torch.equal(logits(model, inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_observation_comes_before_the_round_trip(dtype):
    model = build().to(dtype)
    hook, inputs = AttentionHook(model), batch(SEQUENCES[:1])
    before = observe(hook, model, inputs)
    hook.simulate(torch.full((2, 3), 2.0**-12))  # everything saturates at 448 / 4096 = 0.11
    after = observe(hook, model, inputs, scales_L3=hook.scales_L3)
    assert torch.equal(after.amax_L3[0], before.amax_L3[0])  # layer 1 gets what layer 0 made of it
    assert before.amax_L3[0].min() > 0.11 and (after.saturated_fraction_L3[0, 1:] > 0.5).all()


def positions_seen(model, inputs) -> torch.Tensor:
    seen = []
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    logits(model, inputs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_positions_count_from_the_first_real_token(implementation):
    model = build(implementation=implementation)
    hook, counted = AttentionHook(model), torch.arange(6)[None]
    left, right = batch(side="left"), batch(side="right")
    assert torch.equal(positions_seen(model, left), counted)  # nothing to round: transformers' own
    hook.simulate(torch.ones(2, 3))
    expected = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2], [0, 0, 0, 1, 2, 3]])
    assert torch.equal(positions_seen(model, left), expected)
    assert torch.equal(positions_seen(model, right)[right["attention_mask"].bool()], _counted(SEQUENCES))
    assert torch.equal(positions_seen(model, {"input_ids": left["input_ids"]}), counted)
    given = torch.arange(6).expand(3, -1) + 7
    assert torch.equal(positions_seen(model, left | {"position_ids": given}), given)
    hook.remove()
    assert torch.equal(positions_seen(model, left), counted)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_left_padded_batch_is_observed_as_the_same_sequences_alone(architecture):
    """In float64: what is left are the norms and RoPE's table in fp32, and amax, which is kept in fp32."""
    model = build(architecture).double()
    left = batch(side="left")
    shifted = left | {"position_ids": torch.arange(6).expand(3, -1)}
    hook = AttentionHook(model)
    alone = torch.stack([observe(hook, model, batch([ids])).amax_L3 for ids in SEQUENCES]).amax(0)
    torch.testing.assert_close(observe(hook, model, left).amax_L3, alone, rtol=1e-5, atol=0)
    turned = observe(hook, model, shifted).amax_L3
    assert ((turned / alone - 1).abs()[:, 1] > 0.01).any()


def test_a_forward_that_is_observed_and_one_that_is_not_agree_once_aligned():
    """Old log-probs come from the first, those of the loss from the second."""
    model, left = build(), batch(side="left")
    hook = AttentionHook(model)
    with hook.observing(QKVObservation(2, hook.device)):
        observed = logits(model, left)
    assert not torch.equal(logits(model, left), observed)
    hook.align(True)
    assert torch.equal(logits(model, left), observed)
    hook.align(False)
    with hook.as_engine(None):
        assert torch.equal(logits(model, left), observed)
    assert not torch.equal(logits(model, left), observed)


def in_two_forwards(model, inputs, new=2):
    """Logits of real tokens; the last `new` of each sequence are computed with a cache, under the mask of all."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        first = model(input_ids=ids[:, :-new], attention_mask=mask[:, :-new], use_cache=True)
        last = model(input_ids=ids[:, -new:], attention_mask=mask, past_key_values=first.past_key_values)
    return torch.cat([first.logits, last.logits], 1)[mask.bool()]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_cached_forward_is_the_models_own_while_idle_and_one_forward_while_aligned(architecture, implementation):
    """Norms and angles are FP32 in transformers. A byte of another k shows in the first digits; none is another in
    float64, in which padding of eager attention is NaN.
    """
    model, left = build(architecture, implementation), batch(side="left")
    real, simulated = left["attention_mask"].bool(), [None]
    if implementation == "sdpa":
        model = model.double()
        simulated.append(some_scales(model))
    plain = in_two_forwards(model, left)
    hook = AttentionHook(model)
    assert torch.equal(in_two_forwards(model, left), plain)
    for scales in simulated:
        with hook.as_engine(scales):
            torch.testing.assert_close(in_two_forwards(model, left), logits(model, left)[real], rtol=0, atol=1e-5)
    assert torch.equal(in_two_forwards(model, left), plain)


def _counted(sequences) -> torch.Tensor:
    return torch.cat([torch.arange(len(ids)) for ids in sequences])


def test_left_padding_changes_no_byte_of_the_cache():
    """In float64, so that another order of summation does not carry a k over the edge of an e4m3 step.

    What is left of it are the norms and RoPE's table, which transformers computes in fp32: 2**-24 relative, over two
    layers well below 1e-5. A different byte moves a k by 1/16.
    """
    model = build().double()
    scales = some_scales(model)
    left = batch(side="left")
    shifted = left | {"position_ids": torch.arange(6).expand(3, -1)}
    close = dict(rtol=0, atol=1e-5)
    plain, plain_left = [logits(model, batch([ids]))[0] for ids in SEQUENCES], logits(model, left)
    with attention_of(model) as attention:
        hook = AttentionHook(model)
        hook.simulate(scales)
        alone = defaultdict(list)
        for ids in SEQUENCES:
            alone["logits"].append(logits(model, {"input_ids": torch.tensor([ids])})[0])
            for layer in range(2):
                alone[layer].append(attention.qkv[layer])
        together, states = logits(model, left), attention.qkv
        attention.qkv = {}
        together_shifted, states_shifted = logits(model, shifted), attention.qkv
        hook.remove()
    for row, ids in enumerate(SEQUENCES):
        real = slice(6 - len(ids), None)
        torch.testing.assert_close(plain_left[row, real], plain[row], **close)  # without rounding, no matter
        torch.testing.assert_close(together[row, real], alone["logits"][row], **close)
        for layer in range(2):
            for column in (1, 2):
                assert torch.equal(states[layer][column][row, :, real], alone[layer][row][column][0])
        if len(ids) < 6:
            assert (together_shifted[row, real] - alone["logits"][row]).abs().max() > 1e-3
            differs = states_shifted[0][1][row, :, real] != alone[0][row][1][0]
            assert differs.float().mean() > 0.1
            assert torch.equal(states_shifted[0][2][row, :, real], alone[0][row][2][0])  # v is not turned


def backward(model, inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(**inputs, use_cache=False).logits.double()
    out[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gradients_are_straight_through(implementation):
    """Against x + (round trip - x), in float64: 2**-53 per operation,
    and 2**-24 where transformers computes in fp32.
    """
    model = build(implementation=implementation).double().train()
    scales = some_scales(model) / 4  # the largest elements saturate
    inputs = {"input_ids": torch.tensor(SEQUENCES[:1])}
    plain = backward(model, inputs)

    def with_change(change):
        with attention_of(
            model, lambda i, q, k, v: (q, change(k, scales[i, 1].item()), change(v, scales[i, 2].item()))
        ):
            return backward(model, inputs)

    def clamped(x, scale):
        return straight_through(x.clamp(-448 * scale, 448 * scale), scale)

    expected, without_saturated = with_change(straight_through), with_change(clamped)
    hook = AttentionHook(model)
    hook.simulate(scales)
    gradients = backward(model, inputs)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        size = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * size)
        if any(projection in name for projection in ("q_proj", "k_proj", "v_proj")):
            assert size > 0
            assert (gradient - plain[name]).abs().max() > 1e-2 * size
    for name in ("layers.0.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight"):
        gradient, other = gradients[f"model.{name}"], without_saturated[f"model.{name}"]
        assert (gradient - other).abs().max() > 1e-2 * gradient.abs().max()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("architecture", "implementation"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("qwen2", "sdpa")]
)
def test_gradient_checkpointing_runs_the_same_forward_again(architecture, implementation, reentrant):
    model = build(architecture, implementation)
    scales, inputs = some_scales(model), batch(side="left")
    model.train()
    plain = backward(model, inputs)
    hook = AttentionHook(model)
    hook.simulate(scales)
    expected = backward(model, inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    gradients = backward(model, inputs)
    assert gradients.keys() == expected.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
        if "k_proj.weight" in name:
            assert not torch.equal(gradient, plain[name])


def test_scales_that_end_before_the_backward_pass_change_the_gradient():
    model = build()
    hook, inputs = AttentionHook(model), batch(SEQUENCES[:1])
    hook.simulate(some_scales(model))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    expected = backward(model, inputs)
    model.zero_grad()
    out = model(**inputs, use_cache=False).logits.double()
    hook.simulate(None)
    out[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).mean().backward()
    name = "model.layers.0.self_attn.k_proj.weight"
    assert not torch.equal(model.get_parameter(name).grad, expected[name])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("order", ["peft first", "hook first"])
def test_peft_models_are_looked_through(order, implementation):
    model = build(implementation=implementation)
    scales = some_scales(model)
    plain_hook = AttentionHook(model)
    amax = observe(plain_hook, model, batch()).amax_L3
    plain_hook.simulate(scales)
    expected = logits(model, batch())
    plain_hook.remove()

    lora = LoraConfig(target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
    if order == "peft first":
        policy = get_peft_model(model, lora)
        hook = AttentionHook(policy)
    else:
        hook = AttentionHook(model)
        policy = get_peft_model(model, lora)
    policy.eval()  # new LoRA adapters add exactly nothing
    assert torch.equal(observe(hook, policy, batch()).amax_L3, amax)
    hook.simulate(scales)
    assert torch.equal(logits(policy, batch()), expected)
    gradients = backward(policy, batch())
    assert all("lora_" in name for name in gradients)
    for projection in ("q_proj", "k_proj"):
        assert any(projection in name and gradient.abs().max() > 0 for name, gradient in gradients.items())
    hook.remove()
    assert not torch.equal(logits(policy, batch()), expected)


def test_a_model_without_transformers_is_refused():
    with pytest.raises(ValueError, match="Linear holds no transformers model"):
        AttentionHook(torch.nn.Linear(2, 2))
    model = build()
    assert transformers_model(torch.nn.Sequential(model)) is model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_copy_of_a_hooked_model_has_a_hook_of_its_own(implementation):
    model = build(implementation=implementation)
    plain = logits(model, batch())
    hook = AttentionHook(model)
    logits(model, batch())
    twin = copy.deepcopy(model)
    hook.simulate(torch.ones(2, 3))
    with hook.observing(QKVObservation(2, hook.device)) as observation:
        assert torch.equal(logits(twin, batch()), plain)
    assert observation.elements_L3.sum() == 0
    assert not torch.equal(logits(model, batch()), plain)
    hook.remove()
    assert torch.equal(logits(twin, batch()), plain)
    assert torch.equal(logits(model, batch()), plain)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_saved_model_has_no_trace_of_the_hook(implementation, tmp_path):
    model = build(implementation=implementation)
    model.save_pretrained(tmp_path / "plain")
    before = fingerprint(model)
    hook = AttentionHook(model)
    hook.simulate(torch.ones(2, 3))
    logits(model, batch())
    assert list(model.state_dict()) == before["state"]
    assert model.config.to_dict() == before["config"]
    assert len(list(model.parameters())) == len(list(build().parameters()))
    model.save_pretrained(tmp_path / "hooked")
    plain, hooked = ({f.name: f for f in (tmp_path / name).iterdir()} for name in ("plain", "hooked"))
    assert plain.keys() == hooked.keys() and "config.json" in plain
    assert plain["config.json"].read_text() == hooked["config.json"].read_text()
    assert "trl_fp8" not in json.dumps(json.loads(hooked["config.json"].read_text()))
    left, right = (load_file(files["model.safetensors"]) for files in (plain, hooked))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    loaded = type(model).from_pretrained(tmp_path / "hooked")
    assert loaded.config._attn_implementation == "sdpa"  # transformers' default
