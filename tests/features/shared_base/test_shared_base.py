"""A shared base whose weights are read again: what they were before they became codes, or a reason why not."""

import pytest
import torch
from torchao.quantization import Float8Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing.hub_cache import COMMITS, KEEPS_COMMITS, NAME, write_repository
from trl_fp8.export.export import export_fp8
from trl_fp8.features.shared_base.held_base import HeldBase, SharedBase
from trl_fp8.features.shared_base.stored_base import StoredBase, load_without_base
from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.recipe.recipe import recipe_for_model


def recipe_of(model, **flags):
    return recipe_for_model(model, kv_cache_dtype="auto", **flags)


def from_pretrained(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def handed_over(model, source):
    """A base as it is once an engine has its weights, and what that holds of them."""
    base, recipe = SharedBase(model, source, torch.device("cpu")), source.recipe
    given = dict(base.tensors())
    codes = {}
    for name in given:
        group = [given[peer] for peer in recipe.sharing_scale(name)]
        made = group
        if not isinstance(group[0], Float8Tensor):
            made = quantize_fused([weight.bfloat16() for weight in group], recipe.format, recipe.scale_format)
        codes |= zip(recipe.sharing_scale(name), made, strict=True)
    base.share(codes.get)
    return base, codes


@pytest.mark.parametrize("given_as", ["name", "object"])
@pytest.mark.parametrize(
    "architecture, flags",
    [
        ("qwen3_moe", {}),
        ("mixtral", {"tensor_parallel_size": 2}),
        ("qwen3", {"weight_format": "tensor", "tensor_parallel_size": 2}),
        ("qwen3", {"weight_format": "mxfp8"}),
    ],
    ids=["experts", "other-names", "common-scales", "exponents"],
)
def test_the_source_reads_the_quantized_weights_again(architecture, flags, given_as, checkpoint):
    folder = checkpoint(architecture)
    model, expected = from_pretrained(folder), dict(from_pretrained(folder).named_parameters())
    if given_as == "name":
        model, source = load_without_base(from_pretrained_as, folder, lambda made: recipe_of(made, **flags))
    else:
        source = HeldBase(model, recipe_of(model, **flags))
    base, codes = handed_over(model, source)
    read = dict(base.originals())
    assert read.keys() == source.recipe.fp8_tensors == codes.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)
    assert not any(torch.equal(read[name], dequantize_weight(codes[name], torch.bfloat16)) for name in read)


def from_pretrained_as(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


@pytest.mark.parametrize("given_as", ["name", "object"])
def test_an_fp8_checkpoint_keeps_nothing_but_codes(given_as, checkpoint, tmp_path):
    folder, tokenizer = checkpoint("qwen3"), AutoTokenizer.from_pretrained(checkpoint("qwen3"))
    original = from_pretrained(folder)
    export_fp8(original, tokenizer, tmp_path / "fp8", recipe=recipe_of(original))
    if given_as == "name":
        model, source = load_without_base(from_pretrained_as, str(tmp_path / "fp8"), recipe_of)
    else:
        model = from_pretrained(tmp_path / "fp8")
        source = HeldBase(model, recipe_of(model))
    base, codes = handed_over(model, source)
    assert base.original() == "the checkpoint is FP8"
    read = dict(base.originals())
    assert read.keys() == codes.keys()
    assert all(torch.equal(read[name], dequantize_weight(codes[name], torch.bfloat16)) for name in read)


def test_a_base_that_was_changed_after_it_was_loaded_is_not_taken_for_the_folders(checkpoint):
    model = from_pretrained(checkpoint("qwen3"))
    changed = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(changed)[3, 5] = 0.5
    base, _ = handed_over(model, HeldBase(model, recipe_of(model)))
    with pytest.raises(
        ValueError, match=rf"not those that the adapters were trained on: {changed}.*trainer\.save_model"
    ):
        dict(base.originals())


@pytest.mark.skipif(not KEEPS_COMMITS, reason="this version of transformers keeps no commits")
def test_a_base_of_an_older_commit_is_read_again_at_that_commit(checkpoint, tmp_path, monkeypatch):
    write_repository([checkpoint("qwen3", seed=1), checkpoint("qwen3", seed=2)], tmp_path, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(NAME, revision=COMMITS[0], dtype=torch.bfloat16)
    base, codes = handed_over(model, HeldBase(model, recipe_of(model)))
    expected = dict(from_pretrained(checkpoint("qwen3", seed=1)).named_parameters())
    read = dict(base.originals())
    assert read.keys() == codes.keys() and all(torch.equal(read[name], expected[name]) for name in read)


def test_a_base_that_cannot_be_read_again_is_dequantized_with_a_reason(checkpoint):
    model = from_pretrained(checkpoint("qwen3"))
    base, codes = handed_over(model, HeldBase(model, recipe_of(model)))
    folder, model.config.name_or_path = model.config.name_or_path, "/nowhere"
    reason = base.original()
    assert reason.startswith("the original weights cannot be read again: ") and "/nowhere" in reason
    read = dict(base.originals())
    assert read.keys() == codes.keys()
    assert all(torch.equal(read[name], dequantize_weight(codes[name], torch.bfloat16)) for name in read)
    model.config.name_or_path = folder  # as after a network that was down
    assert isinstance(base.original(), StoredBase)
