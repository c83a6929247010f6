"""Outlines of checkpoints, of which there is only a config.json: published sizes, towers, and configs of no use."""

import json
from math import prod

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3ForCausalLM
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, remap_legacy_layer_types

from testing import other_models, published, tiny_models
from trl_fp8.recipe import from_model
from trl_fp8.recipe.from_model import outline_of, outline_of_pretrained
from trl_fp8.recipe.outline import LayerCache, layer_caches
from trl_fp8.recipe.recipe import is_vision


ORIGINAL = "original_max_position_embeddings"  # up to it longrope takes its factors for short sequences
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 128}
NESTED = {
    "full_attention": LONGROPE | {ORIGINAL: 48},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def outline_of_config(folder, **fields):
    """The outline of a folder that has a config.json with these fields, and nothing else."""
    (folder / "config.json").write_text(json.dumps(fields))
    return outline_of_pretrained(str(folder))


@pytest.mark.parametrize("kind", other_models.VISION)
def test_a_vision_language_model_is_of_the_class_that_its_config_names(kind, tmp_path):
    policy = other_models.policy(kind)
    found = outline_of_config(tmp_path, **policy.config.to_dict())
    assert found.parameters == outline_of(policy).parameters and any(map(is_vision, found.parameters))
    assert (found.class_name, found.config_type) == (type(policy).__name__, kind)
    assert found.decoder == "model.language_model" and found.model_type == policy.config.text_config.model_type


def test_a_flat_config_of_a_vision_language_model_is_read_as_one_of_today(tmp_path):
    text = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    whole = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    flat, nested = outline_of_config(tmp_path, **whole, **text), outline_of_config(tmp_path, **whole, text_config=text)
    assert flat == nested and flat.layers == 2


@pytest.mark.parametrize(
    "architecture, options, expected",
    [
        ("qwen3", {}, (0, 1.0, "silu")),
        ("gemma2", {}, (0, 1.0, "gelu_pytorch_tanh")),
        ("phi3", {"rope_parameters": LONGROPE, ORIGINAL: 64}, (64, 1.0, "silu")),
        ("phi3", {"rope_parameters": LONGROPE | {ORIGINAL: 32}, ORIGINAL: 64}, (64, 1.0, "silu")),
        ("llama", {"rope_parameters": LONGROPE | {ORIGINAL: 32}}, (32, 1.0, "silu")),
        ("llama", {"rope_parameters": YARN}, (0, 1.0, "silu")),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, (0, 2.0, "silu")),
        ("gemma3_text", {"rope_parameters": NESTED}, (48, 1.0, "gelu_pytorch_tanh")),
    ],
)
def test_an_outline_has_the_configs_positions_and_activations(architecture, options, expected, tmp_path):
    tiny_models.config(architecture, **options).save_pretrained(tmp_path)
    found = outline_of_pretrained(str(tmp_path))
    assert (found.short_factor_length, found.stretch, found.activation) == expected


class DropPaths(Qwen3ForCausalLM):
    """Numbers are computed while it is built, which a tensor on the meta device does not have."""

    def __init__(self, config):
        super().__init__(config)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, config.num_hidden_layers)]


def test_a_class_that_computes_while_it_is_built_is_built_as_from_pretrained_builds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(from_model.transformers, "DropPaths", DropPaths, raising=False)
    policy = DropPaths(tiny_models.config("qwen3"))
    found = outline_of_config(tmp_path, **policy.config.to_dict() | {"architectures": ["DropPaths"]})
    assert found.class_name == "DropPaths" and found.parameters == outline_of(policy).parameters


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"model_type": "a_type_of_tomorrow"}, "a_type_of_tomorrow"),
        ({"model_type": "t5"}, "T5Config"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": -8}, "negative dimension"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma3", "text_config": 1}, "text_config"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}, "custom code"),
    ],
)
def test_a_config_of_no_use_is_one_line_that_names_the_model_and_the_reason(fields, said, tmp_path):
    with pytest.raises(ValueError) as error:
        outline_of_config(tmp_path, **{"model_type": "qwen3"} | fields)
    message = str(error.value)
    assert repr(str(tmp_path)) in message and said in message and "\n" not in message and len(message) < 600


@pytest.mark.parametrize("name", published.CONFIGS)
def test_published_models_have_the_size_that_is_stated(name):
    outline, stated = published.outline(name), published.BILLIONS[name]
    billions = sum(prod(shape) for shape in outline.parameters.values()) / 1e9
    # cards cut off as often as they round: one unit of the last digit
    assert abs(billions - float(stated)) < 10.0 ** -len(stated.partition(".")[2])


def kib_per_token(name: str) -> float:
    return sum(2 * cache.elements for cache in published.outline(name).caches) / 1024


def test_caches_of_published_models_are_those_of_their_attention():
    assert kib_per_token("Qwen/Qwen3-8B") == 144
    assert kib_per_token("deepseek-ai/DeepSeek-V3") == 61 * (512 + 64) * 2 / 1024
    assert kib_per_token("Qwen/Qwen3-Next-80B-A3B-Instruct") == 24
    caches = published.outline("google/gemma-3-12b-it").caches
    assert [cache.window for cache in caches] == ([1024] * 5 + [None]) * 8
    assert {cache.elements for cache in caches} == {2 * 8 * 256}


def test_a_checkpoint_is_stored_as_its_config_says_before_and_after_it_is_loaded():
    config = other_models.config("qwen3", quantization_config={"quant_method": "fp8"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert outline_of(model).stored_as == "fp8"
    model.config.quantization_config = FineGrainedFP8Config(dequantize=True)  # what loading leaves there
    assert outline_of(model).stored_as == "fp8"


@pytest.mark.parametrize(
    "kind, caches",
    [
        ("gemma3n_text", [LayerCache(256, window=512), LayerCache(256), LayerCache(), LayerCache()]),
        ("jamba", [LayerCache(), LayerCache(256)] * 2),
        ("nemotron_h", [LayerCache(), LayerCache(256), LayerCache()]),
    ],
)
def test_layers_without_a_cache_of_their_own_have_none(kind, caches):
    with torch.device("meta"):
        assert list(outline_of(AutoModelForCausalLM.from_config(other_models.config(kind))).caches) == caches


def test_a_kind_of_layer_counts_as_full_attention_only_if_it_attends():
    """`layer_caches` lists the other kinds of transformers' table, which has "linear_attention" for "mamba"."""
    assert remap_legacy_layer_types(["mamba"]) == ["linear_attention"]
    caches = layer_caches({"layer_types": ALLOWED_ATTN_LAYER_TYPES}, len(ALLOWED_ATTN_LAYER_TYPES), 2, 64)
    without = {kind for kind, cache in zip(ALLOWED_ATTN_LAYER_TYPES, caches, strict=True) if not cache.elements}
    assert without == {"conv", "linear_attention", "moe"}
    others = {kind for kind in ALLOWED_ATTN_LAYER_TYPES if "attention" not in kind} - without
    assert others == {"hybrid", "hybrid_sliding", "minimax_m3_sparse"}
