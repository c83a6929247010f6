"""Outlines from a config.json are those of the models that transformers builds from it."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config

from testing import other_models, published, tiny_models
from trl_fp8.recipe.architectures import ARCHITECTURES, WRAPPERS
from trl_fp8.recipe.caches import LayerCache, layer_caches
from trl_fp8.recipe.fields import completed
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.outline import Outline, outline_of_config


ALONE = [kind for kind, architecture in ARCHITECTURES.items() if architecture.class_name]
DEEP = {"num_hidden_layers": 8}  # each kind of layer of each pattern
WINDOWS = {"use_sliding_window": True, "sliding_window": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
CONFIGS = {
    **{kind: lambda kind=kind: other_models.config(kind, **DEEP) for kind in ALONE},
    "tied": lambda: tiny_models.config(tied=True),
    "biases": lambda: tiny_models.config("llama", attention_bias=True, mlp_bias=True),
    "latent_biases": lambda: other_models.config("deepseek_v2", attention_bias=True, mlp_bias=True),
    "latent_dense_layers": lambda: other_models.config("glm4_moe_lite", mlp_layer_types=["dense", "dense"]),
    "latent_plain_queries": lambda: other_models.config("deepseek_v3", q_lora_rank=None),
    "query_norms": lambda: other_models.config("cohere", use_qk_norm=True, tie_word_embeddings=False),
    "late_windows": lambda: other_models.config("qwen3", **DEEP, **WINDOWS, max_window_layers=5),
    "some_windows": lambda: other_models.config("qwen2_moe", **DEEP, **WINDOWS, max_window_layers=5),
    "every_second": lambda: other_models.config("qwen3_next", **DEEP, full_attention_interval=2),
    "float32_state": lambda: other_models.config("qwen3_5_text", mamba_ssm_dtype="float32"),
    "longrope": lambda: tiny_models.config("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64),
    "stored_as_fp8": lambda: other_models.config("qwen3", quantization_config={"quant_method": "fp8"}),
    "dense_and_sparse": lambda: tiny_models.config(
        "qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "no_experts": lambda: tiny_models.config("qwen3_moe", mlp_only_layers=[0, 1]),
}


def both_ways(config, folder, auto=AutoModelForCausalLM) -> tuple[Outline, Outline]:
    """Outlines from the config.json that `config` is saved as, and from the model on the meta device."""
    config.save_pretrained(folder)
    config.name_or_path = "user/model"
    with torch.device("meta"):
        of_model = outline_of(auto.from_config(config))
    return outline_of_config(json.loads((folder / "config.json").read_text()), "user/model"), of_model


@pytest.mark.parametrize("name", CONFIGS)
def test_outline_of_a_config_is_that_of_the_model(name, tmp_path):
    found, expected = both_ways(CONFIGS[name](), tmp_path)
    assert found == expected and list(found.parameters) == list(expected.parameters)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_vision_language_model_has_the_outline_of_its_language_model(kind, tmp_path):
    text = other_models.config(WRAPPERS[kind].language_model, **DEEP).to_dict()
    found, whole = both_ways(CONFIG_MAPPING[kind](text_config=text), tmp_path, AutoModelForImageTextToText)
    named = {name: shape for name, shape in whole.parameters.items() if name in found.parameters}
    linears = {name: shape for name, shape in whole.linears.items() if name in found.linears}
    assert found == replace(whole, parameters=named, linears=linears, is_text_only=True)
    assert len(named) == sum("language_model" in name or "lm_head" in name for name in whole.parameters)


def test_a_flat_config_of_a_vision_language_model_is_read_as_one_of_today():
    flat = {"model_type": "qwen2_5_vl", "hidden_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": True}
    nested = {"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 256, "num_hidden_layers": 2}}
    assert outline_of_config(flat, "m") == outline_of_config(nested | {"tie_word_embeddings": True}, "m")


def as_transformers_has_it(config: dict) -> None:
    """Assert that what a config leaves out is what the config class puts there."""
    kind = config["model_type"]
    made = CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(config)))
    theirs, ours = made.to_dict(), completed(config, kind)
    layers, heads, size = ours["num_hidden_layers"], ours["num_key_value_heads"], ours["head_dim"]
    assert layer_caches(ours, layers, heads, size) == layer_caches(theirs, layers, heads, size)
    ignored = ("sliding_window", "layer_types")  # written in two ways, which `layer_caches` sees through
    same = [key for key in ours if key in theirs and key not in ignored]
    assert len(same) >= 8
    assert {key: ours[key] or None for key in same} == {
        key: theirs[key] or (size if key == "head_dim" else None) for key in same
    }


@pytest.mark.parametrize("kind", ALONE)
def test_what_a_config_leaves_open_is_transformers_default(kind):
    as_transformers_has_it({"model_type": kind})


@pytest.mark.parametrize("name", published.CONFIGS)
def test_each_field_may_be_left_open(name):
    config = published.CONFIGS[name].get("text_config", published.CONFIGS[name])
    for left_out in {"", *config} - {"model_type", "hidden_size", "num_hidden_layers"}:  # what others have to fit
        as_transformers_has_it({key: value for key, value in config.items() if key != left_out})


def test_what_is_not_known_is_left_to_transformers():
    assert outline_of_config({}, "m") is None
    assert outline_of_config({"model_type": "mamba", "num_hidden_layers": "many"}, "m") is None
    assert outline_of_config({"model_type": "mistral3", "text_config": {"model_type": "mamba"}}, "m") is None
    assert outline_of_config({"model_type": "qwen3_vl_text"}, "m") is None


@pytest.mark.parametrize(
    "given, said",
    [
        ([], "its content=[], where an object"),
        ({"model_type": 3}, "model_type=3, where a string"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, where a whole number from 1 to 1000"),
        ({"hidden_size": 4096.0}, "hidden_size=4096.0, where a whole number from 1"),
        ({"vocab_size": 10**3000}, "vocab_size=a number of hundreds of digits"),
        ({"num_attention_heads": True}, "num_attention_heads=True, where a whole number"),
        ({"hidden_size": 8, "head_dim": None}, "head_dim=None, where a whole number from 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', where true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types=['full_attention'], where a list of num_hidden_layers=32"),
        ({"architectures": "Qwen3"}, "architectures='Qwen3', where a list of strings"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method=None, where a string"),
        ({"model_type": "llama", "hidden_size": 8}, "num_attention_heads=32, where at most hidden_size=8"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "0"}, "mlp_only_layers='0', where a list of numbers"),
        ({"model_type": "mixtral", "num_experts": 0}, "num_experts=0, where a whole number from 1"),
        ({"model_type": "mistral3"}, "text_config=None, where an object"),
        ({"model_type": "gemma3", "text_config": 1}, "text_config=1, where an object"),
        ({"model_type": "gemma3", "text_config": {"head_dim": 0}}, "text_config.head_dim=0, where a whole"),
    ],
)
def test_a_field_of_no_use_is_named(given, said):
    with pytest.raises(ValueError) as error:
        outline_of_config({"model_type": "qwen3"} | given if isinstance(given, dict) else given, "m")
    assert f"config.json: {said}" in str(error.value) and len(str(error.value)) < 250


FIELDS = sorted(
    {"model_type", "architectures", "quantization_config", "text_config", "not_known"}.union(
        *(architecture.defaults for architecture in ARCHITECTURES.values())
    )
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([0, -1, 1, 10**9, 2**63]) | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), values),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from([*ARCHITECTURES, *WRAPPERS]),
    changed=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3),
)
def test_whatever_a_config_holds_has_an_outline_or_an_error_that_names_a_field(kind, changed):
    try:
        found = outline_of_config({"model_type": kind} | changed, "m")
    except ValueError as error:
        assert str(error).startswith("config.json: ") and any(key in str(error) for key in FIELDS)
    else:
        assert found is None or len(found.caches) == found.layers <= 1000
        assert found is None or all(size > 0 for shape in found.parameters.values() for size in shape)


@pytest.mark.parametrize("name", published.CONFIGS)
def test_published_models_have_the_size_that_is_stated(name):
    outline, stated = outline_of_config(published.CONFIGS[name], name), published.BILLIONS[name]
    billions = sum(prod(shape) for shape in outline.parameters.values()) / 1e9
    # cards cut off as often as they round: one unit of the last digit
    assert abs(billions - float(stated)) < 10.0 ** -len(stated.partition(".")[2])


def kib_per_token(name: str) -> float:
    return sum(2 * cache.elements for cache in outline_of_config(published.CONFIGS[name], name).caches) / 1024


def test_caches_of_published_models_are_those_of_their_attention():
    assert kib_per_token("Qwen/Qwen3-8B") == 144
    assert kib_per_token("deepseek-ai/DeepSeek-V3") == 61 * (512 + 64) * 2 / 1024
    assert kib_per_token("Qwen/Qwen3-Next-80B-A3B-Instruct") == 24
    caches = outline_of_config(published.CONFIGS["google/gemma-3-12b-it"], "m").caches
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


def test_a_plan_imports_neither_torch_nor_transformers_and_takes_half_a_second(tmp_path):
    """Of CPU time, which other work on the host does not add to; here it is a fifth of that for each of them."""
    code = (
        "import sys; from trl_fp8.cli import main\n"
        "status = main(['plan', sys.argv[1], '--json'])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(); sys.exit(status)"
    )
    for name in ("Qwen/Qwen3-235B-A22B", "google/gemma-3-12b-it", "deepseek-ai/DeepSeek-V3"):
        published.write(name, tmp_path / name)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code, tmp_path / name], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
