"""The BF16 between the FP8 linears: an FP32 policy that computes as its BF16 copy, bit for bit, and trains in FP32."""

import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from testing import tiny_models
from trl_fp8.policy.flow.bf16_modules import BF16Modules
from trl_fp8.policy.flow.flow import FP8Flow
from trl_fp8.policy.flow.linear import FP8Linear, FP8Linears
from trl_fp8.recipe.recipe import recipe_for_model


MODELS = [("qwen3", False), ("qwen3", True), ("qwen2", False), ("llama", False), ("llama", True), ("qwen3_moe", False)]


def build(architecture="qwen3", tied=False, implementation="sdpa"):
    """FP32, and no parameter at its initial 0 or 1, where a cast that is left out would not show."""
    model = tiny_models.build(architecture, tied=tied, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * (parameter.dim() == 1))
    return model


def in_bf16(model):
    """A copy with BF16 parameters, as a checkpoint is loaded in BF16: the rotary frequencies stay FP32.

    Routers hand on FP32 gate weights made of BF16 logits, as the engine's do; transformers would round them again.
    """
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for module in twin.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.forward = partial(route, module.weight, module.top_k)
    return twin


def route(weight, top_k, hidden_states):
    logits = (hidden_states.reshape(-1, weight.shape[1]) @ weight.T).float()
    chosen = logits.softmax(-1).topk(top_k, dim=-1)
    return logits, chosen.values, chosen.indices


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


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture, tied", MODELS)
def test_the_forward_is_the_bf16_models_bit_for_bit(architecture, tied, implementation):
    model = build(architecture, tied, implementation)
    in_fp32, expected = logits(model), logits(in_bf16(model))
    handle = BF16Modules.install(model)
    found = logits(model)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert not torch.equal(found, in_fp32.to(torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # what is BF16 already is not changed by autocast
        assert torch.equal(logits(model), expected)
    handle.remove()
    assert torch.equal(logits(model), in_fp32)


def test_autocast_alone_is_another_forward():
    """Norms, residual stream and embeddings stay FP32 under autocast: what the modules are there for."""
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(logits(model), logits(in_bf16(model)))


@pytest.mark.parametrize("architecture, tied", MODELS)
def test_parameters_names_and_classes_stay_and_remove_leaves_nothing(architecture, tied):
    model = build(architecture, tied)
    before, classes = dict(model.named_parameters()), {name: type(m) for name, m in model.named_modules()}
    state, attributes = model.state_dict(), {name: set(m.__dict__) for name, m in model.named_modules()}
    handle = BF16Modules.install(model)
    logits(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert {parameter.dtype for parameter in after.values()} == {torch.float32}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()
    owners = {name.rpartition(".")[0] for name in model.state_dict()}  # a tied head owns a parameter too
    turned = {name for name, module in model.named_modules() if module in handle.modules.values()}
    assert turned == owners
    assert all(isinstance(module, classes[name]) for name, module in model.named_modules())
    assert isinstance(model.lm_head, nn.Linear) and isinstance(model.model.embed_tokens, nn.Embedding)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    handle.remove()
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture, tied", MODELS)
def test_gradients_are_the_bf16_models_cast_to_fp32(architecture, tied, implementation):
    """Every matrix and norm bit for bit. The embedding adds up the same BF16 rows in FP32, which BF16 would round."""
    model = build(architecture, tied, implementation)
    twin = in_bf16(model)
    twin.lm_head.weight = nn.Parameter(twin.lm_head.weight.detach().clone())  # the two uses of a tied weight apart
    rows = []

    def hook(module, args, output):
        output.register_hook(rows.append)

    twin.model.embed_tokens.register_forward_hook(hook)
    expected = {name: gradient.float() for name, gradient in gradients(twin).items()}
    in_bf16_sum = expected["model.embed_tokens.weight"]
    ids = batch()["input_ids"].flatten()
    table = torch.zeros(in_bf16_sum.shape, dtype=torch.float64).index_add_(0, ids, rows[0].flatten(0, 1).double())
    if tied:
        table += expected.pop("lm_head.weight").double()
    BF16Modules.install(model)
    found = gradients(model)
    embedding = found.pop("model.embed_tokens.weight")
    expected.pop("model.embed_tokens.weight")
    assert found.keys() == expected.keys()
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert all(torch.equal(found[name], expected[name]) and found[name].any() for name in found)
    # at most 48 rows and a head are added: 49 roundings to FP32, each of at most 2**-24 of the largest partial sum
    bound = 49 * 2**-24 * (table.abs().max() + rows[0].abs().max() * 49).item()
    assert (embedding - table).abs().max() < bound < 1e-2 * table.abs().max()
    if not tied:
        assert (in_bf16_sum - table).abs().max() > 10 * bound


def test_an_error_inside_a_forward_leaves_the_fp32_parameters():
    model = build()
    BF16Modules.install(model)
    norm = model.model.layers[0].input_layernorm
    parameters = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    for module, bad in ((norm, "not a tensor"), (model.lm_head, torch.zeros(2, 3)), (model.lm_head, None)):
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            module(bad)
    after = dict(model.named_parameters())
    assert all(
        after[name] is parameter and torch.equal(parameter, value) for name, (parameter, value) in parameters.items()
    )
    assert after[next(iter(after))].dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("architecture, tied", [("qwen3", False), ("llama", True), ("qwen3_moe", False)])
def test_gradient_checkpointing_changes_no_gradient(architecture, tied, reentrant):
    model = build(architecture, tied)
    BF16Modules.install(model)
    model.train()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    runs = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: runs.append(1))
    checkpointed = gradients(model)
    assert len(runs) == 2
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in plain.items())


def test_the_optimizer_moves_fp32_masters_by_less_than_a_bf16_step():
    """A step of 1e-6 of a weight is lost in BF16 and is kept here; many of them change the forward."""
    model = build()
    before = logits(in_bf16(model))
    BF16Modules.install(model)
    weight = model.model.norm.weight
    start = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1 + 1e-6)
    assert not torch.equal(weight, start) and torch.equal(logits(model), before)
    with torch.no_grad():
        for _ in range(20_000):
            weight.mul_(1 + 1e-6)
    assert not torch.equal(logits(model), before)


def test_lora_adapters_stay_fp32_and_train():
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(build(), lora)
    handle = BF16Modules.install(model)
    adapters = [module for name, module in model.named_modules() if ".lora_" in name and isinstance(module, nn.Linear)]
    assert len(adapters) == 8 and not set(adapters) & set(handle.modules.values())
    assert {type(adapter) for adapter in adapters} == {nn.Linear}
    assert {adapter.weight.dtype for adapter in adapters} == {torch.float32}
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.base_layer in handle.modules.values()
    seen = []
    hook = layer.lora_A["default"].register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    found = gradients(model)
    hook.remove()
    assert seen == [(torch.float32, torch.float32)]
    assert all((gradient is not None) == ("lora_" in name) for name, gradient in found.items())
    assert all(
        gradient.any() and gradient.dtype == torch.float32 for gradient in found.values() if gradient is not None
    )
    handle.remove()
    assert type(layer.base_layer) is nn.Linear


def test_fp8_linears_are_left_to_themselves():
    model = build()
    linears = FP8Linears.install(model, recipe_for_model(model).fp8_modules, FP8Flow())
    handle = BF16Modules.install(model)
    assert {type(layer) for layer in linears.modules.values()} == {FP8Linear}
    assert not set(handle.modules.values()) & set(linears.modules.values())
    seen = []
    for layer in linears.modules.values():
        layer.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    logits(model)
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 14


def test_copies_compute_alike_and_keep_their_own_parameters():
    model = build(tied=True)
    BF16Modules.install(model)
    expected = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), expected)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight is not model.lm_head.weight
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert not torch.equal(logits(twin), expected) and torch.equal(logits(model), expected)


def test_what_is_saved_is_the_fp32_model(tmp_path):
    model = build()
    expected = logits(model)
    BF16Modules.install(model)
    logits(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), expected)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_trls_fused_head_sees_the_bf16_hidden_states_and_trains_the_fp32_head(tied):
    model = build(tied=tied)
    twin = in_bf16(model)
    BF16Modules.install(model)
    results = []
    for each in (model, twin):
        add_fused_lm_head(each)
        output = each(**batch(), labels=batch()["input_ids"], fused_lm_head=True)
        each.zero_grad()
        output.loss.backward()
        results.append((output.log_probs.detach().float(), each.lm_head.weight.grad))
    (ours, our_gradient), (theirs, their_gradient) = results
    assert torch.equal(ours, theirs) and our_gradient.dtype == torch.float32
    if not tied:  # TRL adds a head's gradient up in FP32 and casts it to the head's dtype
        assert torch.equal(our_gradient.to(torch.bfloat16), their_gradient)
    assert not torch.equal(our_gradient, their_gradient.float())
