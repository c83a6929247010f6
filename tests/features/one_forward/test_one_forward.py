"""A policy that computes as an engine: its values are the engine's, its weights and names stay its own."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from testing import tiny_models
from testing.fake_engine import FakeEngine, followed
from trl_fp8.features.one_forward.followed_linear import BackwardPrecision
from trl_fp8.features.one_forward.one_forward import OneForward, require_followable
from trl_fp8.policy.hook import hook_of
from trl_fp8.policy.swapped import release
from trl_fp8.recipe.recipe import recipe_for_model


MODELS = [
    ("qwen3", False),
    ("qwen2", False),
    ("llama", True),
    ("gemma", True),
    ("gemma3_text", True),
    ("cohere", True),
]


def build(architecture="qwen3", tied=False, implementation="sdpa"):
    """FP32, and no parameter at its initial 0 or 1."""
    model = tiny_models.build(architecture, tied=tied, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * (parameter.dim() == 1))
    return model


def batch():
    """Two lengths, padded on the left."""
    ids = torch.randint(4, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model):
    with torch.no_grad():
        return model(**batch()).logits


def gradients(model):
    model.zero_grad()
    model(**batch(), labels=batch()["input_ids"]).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def of_the_engine(engine, ids):
    """Hidden states of one sequence, from the engine's parts alone, as Qwen3 strings them together."""
    config, count = engine.held.config, len(ids)
    positions, starts = torch.arange(count), torch.tensor([0, count], dtype=torch.int32)
    h = engine.held.model.embed_tokens.weight[ids].to(torch.bfloat16)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        qkv = engine.linear(f"{at}.self_attn.q_proj")(engine.norm(f"{at}.input_layernorm")(h))
        q, k, v = (part.unflatten(1, (-1, config.head_dim)) for part in qkv[:, :512].split([256, 128, 128], 1))
        q, k = engine.norm(f"{at}.self_attn.q_norm")(q), engine.norm(f"{at}.self_attn.k_norm")(k)
        q, k = (part.unflatten(1, (-1, 64)) for part in engine.rotary(layer)(positions, q.flatten(1), k.flatten(1)))
        output = engine.attention(layer)(q, k, v, starts, count, None)[0].flatten(1)
        h = h + engine.linear(f"{at}.self_attn.o_proj")(output)[:, :128]
        gate_up = engine.linear(f"{at}.mlp.gate_proj")(engine.norm(f"{at}.post_attention_layernorm")(h))
        hidden = engine.activation(f"{at}.mlp")(gate_up[:, :512])
        h = h + engine.linear(f"{at}.mlp.down_proj")(hidden)[:, :128]
    return engine.linear("lm_head")(engine.norm("model.norm")(h))[:, :64]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_values_are_the_engines_bit_for_bit(implementation):
    model = build(implementation=implementation)
    plain = logits(model)
    forward, engine = followed(model)
    inputs, found = batch(), logits(model)
    assert found.dtype == torch.bfloat16
    for ids, mask, row in zip(inputs["input_ids"], inputs["attention_mask"].bool(), found, strict=True):
        assert torch.equal(row[mask], of_the_engine(engine, ids[mask]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(model), found)
    assert (found.float() - plain).abs().mean() > 0.01


@pytest.mark.parametrize("architecture, tied", MODELS)
def test_while_off_and_once_removed_it_is_the_plain_model(architecture, tied):
    model = build(architecture, tied)
    expected, classes = logits(model), {name: type(module) for name, module in model.named_modules()}
    plain, attributes = gradients(model), {name: set(module.__dict__) for name, module in model.named_modules()}
    forward, _ = followed(model)
    on = logits(model)
    assert not torch.equal(on.float(), expected)
    with forward.switched(on=False):
        inputs = batch()  # while a hook is there real tokens have the positions that an engine gives them
        assert torch.equal(model(**inputs).logits, expected)
        assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients(model).items())
    assert torch.equal(logits(model), on)
    forward.remove()
    forward.hook.remove()
    assert torch.equal(logits(model), expected)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes


@pytest.mark.parametrize("architecture, tied", MODELS)
def test_parameters_names_and_class_relations_stay(architecture, tied):
    model = build(architecture, tied)
    before, state, classes = dict(model.named_parameters()), model.state_dict(), [type(m) for m in model.modules()]
    forward, _ = followed(model)
    logits(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True))
    owners = {name.rpartition(".")[0] for name in state}  # a tied head owns a parameter too
    layers = {f"model.layers.{layer}" for layer in (0, 1)}
    parallel = layers if architecture == "cohere" else set()  # which add up two branches at once
    assert set(forward.modules) == owners | {f"{layer}.mlp" for layer in layers} | {"model.rotary_emb"} | parallel


def test_an_engine_without_a_part_is_refused_and_nothing_changes():
    model = build()
    classes, recipe = [type(module) for module in model.modules()], recipe_for_model(model)
    engine = FakeEngine(model, recipe, lacks=("model.layers.1.input_layernorm",))
    with pytest.raises(ValueError, match=r"the engine has no model\.layers\.1\.input_layernorm"):
        OneForward(model, recipe, engine, BackwardPrecision(), hook_of(model))
    assert [type(module) for module in model.modules()] == classes


class OddLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class OddEmbedding(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


@pytest.mark.parametrize(
    "path, odd, message",
    [
        ("lm_head", OddLinear, "lm_head is a OddLinear, whose forward the engine does not compute"),
        ("model.embed_tokens", OddEmbedding, "embedding is a OddEmbedding, and where an engine rounds"),
    ],
)
def test_modules_that_compute_something_else_are_refused(path, odd, message):
    model = build()
    model.get_submodule(path).__class__ = odd
    with pytest.raises(ValueError, match=message):
        require_followable(model, recipe_for_model(model), "bf16")


def test_families_of_models_that_nothing_is_known_of_are_refused():
    model = tiny_models.build("glm4_moe")
    with pytest.raises(ValueError, match="fp8_forward='one_forward' with a policy of type 'glm4_moe'.*qwen3"):
        require_followable(model, recipe_for_model(model), "bf16")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_runs_each_forward_again_with_its_own_padding(reentrant):
    """Two forwards before one backward: the second must not lend its sequences to the first."""
    model = build()
    followed(model)
    other = {"input_ids": batch()["input_ids"].flip(0), "attention_mask": batch()["attention_mask"].flip(0)}
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        sum(model(**inputs).logits[:, -1].float().square().sum() for inputs in (batch(), other)).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())


def test_a_released_model_computes_by_itself_and_can_follow_again():
    model = build()
    plain = logits(model)
    first, _ = followed(model)
    assert not torch.equal(logits(model), plain)
    release(model)
    assert not first.modules and torch.equal(logits(model), plain)
    second, _ = followed(model)
    assert second.modules and not torch.equal(logits(model), plain)


def test_dropout_that_the_engine_does_not_have_is_refused():
    model = tiny_models.build("qwen3", attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1 in the model's config.*'attention_dropout': 0\.0"):
        require_followable(model, recipe_for_model(model), "bf16")


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_no_engine_and_train_on_their_own(clone):
    model = build(tied=True)
    plain = logits(model)
    forward, engine = followed(model)
    expected, weights = logits(model), engine.held.model.norm.weight
    twin = clone(model)
    assert not any(module is engine.held for module in twin.modules())
    assert torch.equal(logits(twin), plain)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight is not model.lm_head.weight
    gradients(twin)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert torch.equal(logits(model), expected) and engine.held.model.norm.weight is weights
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward", ["bf16", "fp8"])
def test_gradient_checkpointing_changes_no_gradient(backward, reentrant):
    found = []
    for checkpointing in (False, True):
        model = build()
        forward, engine = followed(model, precision=backward)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        found.append(gradients(model))
        assert [call for linear in forward._calls.values() for call in linear if call._output is not None] == []
    assert all(torch.equal(found[1][name], gradient) and gradient.any() for name, gradient in found[0].items())


def test_fused_layers_are_one_call():
    model = build()
    _, engine = followed(model)
    logits(model)
    assert {name.rpartition(".")[2]: linear.calls for name, linear in engine.linears.items()} == {
        "q_proj": 1,
        "o_proj": 1,
        "gate_proj": 1,
        "down_proj": 1,
        "lm_head": 1,
    }
    with torch.inference_mode():  # where nobody sees whether an input has changed
        model(**batch())
    assert engine.linears["model.layers.0.self_attn.q_proj"].calls == 1 + 3


def test_values_are_those_of_the_weights_that_the_engine_holds():
    """So whoever changes weights brings the engine up to date; only the embedding is the policy's own."""
    model = build()
    followed(model)
    before = logits(model)
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 if parameter is table else 1.5)
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        table.mul_(1.5)
    assert not torch.equal(logits(model), before)


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "gate_proj"]])
def test_adapters_get_the_merged_values_and_gradients_of_their_own(targets):
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=0.0)
    model = get_peft_model(build(), lora)
    names = [name for name, _ in model.named_parameters()]
    merged = copy.deepcopy(model).merge_and_unload()
    followed(merged)
    forward, engine = followed(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(logits(model), logits(merged))
    assert engine.linears["model.layers.0.self_attn.q_proj"].calls == 1
    found = gradients(model)
    assert all((gradient is not None) == ("lora_" in name) for name, gradient in found.items())
    assert all(gradient.any() for gradient in found.values() if gradient is not None)
    attention = model.base_model.model.model.layers[0].self_attn
    assert type(attention.q_proj.lora_A["default"]) is nn.Linear
    assert attention.q_proj.base_layer.lasting_codes() is None  # the engine's are those of a sum
    assert attention.o_proj.lasting_codes() is not None


def test_a_frozen_policy_keeps_nothing_for_a_backward():
    model = build().requires_grad_(False)
    followed(model)
    assert model(**batch()).logits.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_of_either_dtype_get_gradients_of_theirs(dtype):
    model = build().to(torch.bfloat16)
    forward, _ = followed(model.to(dtype))
    found = gradients(model)
    assert {gradient.dtype for gradient in found.values()} == {dtype}


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
def test_a_model_overfits_one_batch(backward):
    """The engine is brought up to date after each step, as a trainer does."""
    model, losses = build(), []
    forward, engine = followed(model, precision=backward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(25):
        loss = model(**batch(), labels=batch()["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        forward.remove()
        forward.hook.remove()
        forward, engine = followed(model, precision=backward)
    assert losses[-1] < 0.1 * losses[0], losses
