"""Linears and experts without weights: values and gradients of the dequantized weight, which nobody keeps."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed

from testing.tiny_models import build
from trl_fp8.features.shared_base.held_base import HeldBase, SharedBase
from trl_fp8.features.shared_base.shared_modules import share
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_weight
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.names import TRANSFORMERS
from trl_fp8.recipe.recipe import recipe_for_model


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shared(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """A layer of codes, and one that holds what they stand for."""
    plain = nn.Linear(256, 384, bias)
    codes = quantize_weight(plain.weight.detach().bfloat16(), "pow2")
    layer = copy.deepcopy(plain)
    share(layer)
    layer.codes = codes
    plain.weight.data = dequantize_weight(codes, torch.float32)
    return layer, plain.requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_values_and_gradients_are_those_of_the_dequantized_weight(bias, autocast):
    layer, plain = shared(bias)
    found = []
    for one in (layer, plain):
        x = random(3, 5, 256).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = one(x)
        y.backward(random(3, 5, 384, seed=1).to(y.dtype))
        found.append((y.detach(), x.grad))
    (y, dx), (expected_y, expected_dx) = found
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    # a bias that is added afterwards is one rounding more; the products are the same calls
    tolerance = 2.0**-7 if autocast and bias else 2.0**-22 if bias else 0
    assert (y - expected_y).abs().max() <= tolerance * expected_y.abs().max()
    assert torch.equal(dx, expected_dx)


def test_no_copy_of_a_weight_outlives_a_call():
    layer, _ = shared()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        layer(random(4, 256).requires_grad_())
    assert not any(shape == (384, 256) for shape in kept)
    assert list(layer.state_dict()) == ["bias"]


def test_gradient_checkpointing_computes_the_same():
    layer, _ = shared()
    gradients = []
    for call in (layer, lambda x: checkpointed(layer, x, use_reentrant=False)):
        x = random(4, 256).requires_grad_()
        call(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0].any()


def test_a_shared_linear_has_its_weights_shape_without_values():
    layer, plain = shared()
    assert (layer.weight.shape, layer.weight.dtype) == (plain.weight.shape, torch.float32)
    assert layer.weight.isnan().all() and layer.weight.untyped_storage().nbytes() == 4
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_adapters_are_put_on_it_and_trained():
    layer, plain = shared()
    model = get_peft_model(nn.Sequential(layer), LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))
    adapter = model.base_model.model[0]
    x, a, b = random(7, 256), adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
    assert a.dtype == torch.float32 and not a.isnan().any()
    y = model(x)
    assert (y - (plain(x) + adapter.scaling["default"] * x @ a.T @ b.T)).abs().max() < 1e-5
    y.sum().backward()
    assert all(parameter.grad.any() for parameter in (a, b)) and layer.bias.grad is None


def policy_on_codes(architecture: str):
    """(policy with a shared base, recipe, the codes that it got, a policy that holds what they stand for)"""
    recipe = recipe_for_model(build(architecture), kv_cache_dtype="auto")
    model, plain, codes = build(architecture), build(architecture), {}
    outline = outline_of(model)
    base = SharedBase(model, HeldBase(model, recipe), torch.device("cpu"))
    assert outline_of(model).parameters == outline.parameters and outline_of(model).experts == outline.experts
    assert recipe_for_model(model, kv_cache_dtype="auto") == recipe
    for name, weight in base.tensors():
        [codes[name]] = quantize_fused([weight.bfloat16()], recipe.format, recipe.scale_format)
        module, _, parameter = name.rpartition(".")
        getattr(plain.get_submodule(module), parameter).data = dequantize_weight(codes[name], torch.float32)
    base.share(codes.__getitem__)
    return model, recipe, codes, plain.requires_grad_(False)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_whole_policy_computes_with_the_codes(architecture):
    model, recipe, codes, plain = policy_on_codes(architecture)
    assert set(codes) == recipe.fp8_tensors and bool(recipe.fp8_experts) == (architecture == "qwen3_moe")
    assert not recipe.fp8_tensors.intersection(name for name, _ in model.named_parameters())
    found = []
    for one in (model, plain):
        embedded = one.get_input_embeddings()(torch.arange(20)[None]).detach().requires_grad_()
        logits = one(inputs_embeds=embedded).logits
        logits.logsumexp(-1).sum().backward()
        found.append((logits.detach(), embedded.grad))
    for ours, theirs in zip(*found, strict=True):
        # FP32; experts are added in another order
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max() and theirs.any()
    if recipe.fp8_experts:
        experts = model.get_submodule(recipe.fp8_experts[0])
        assert all(getattr(experts, name).isnan().all() for name in TRANSFORMERS.fused)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_policy_whose_base_is_in_no_engine_yet_says_so(architecture):
    model = build(architecture)
    recipe = recipe_for_model(model)
    HeldBase(model, recipe)
    module = model.get_submodule((recipe.fp8_experts or recipe.fp8_modules)[0])
    inputs = [random(3, module.hidden_dim), torch.zeros(3, 2).long(), random(3, 2)] if recipe.fp8_experts else []
    with pytest.raises(RuntimeError, match="no weights before its trainer's engine holds its base"):
        module(*(inputs or [random(3, module.in_features)]))


def test_a_base_is_handed_over_once():
    model = build("qwen3")
    held = HeldBase(model, recipe_for_model(model))
    assert len(list(held.tensors())) == len(list(held.tensors())) == 14  # a first write may be repeated
    held.release()
    with pytest.raises(RuntimeError, match="pass the model by its name"):
        next(held.tensors())


def test_a_policy_that_shared_its_base_before_hands_over_its_codes():
    model, recipe, codes, _ = policy_on_codes("qwen3_moe")
    again = dict(HeldBase(model, recipe).tensors())
    assert set(again) == set(codes) and all(
        again[name].qdata.data_ptr() == codes[name].qdata.data_ptr() for name in codes
    )
