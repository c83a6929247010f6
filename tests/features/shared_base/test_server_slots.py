"""Room for adapters in a server: the flag that asks for it, and what is refused."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from testing import tiny_models
from trl_fp8.commands import serve
from trl_fp8.features.shared_base.adapter_tensors import adapter_ranks
from trl_fp8.features.shared_base.engine_served import ServedAdapters
from trl_fp8.features.shared_base.server_slots import lora_argument, require_same_ranks
from trl_fp8.recipe.recipe import recipe_for_model


Q, V, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj"
CONFIGS = {
    "kinds": ({"r": 4, "target_modules": ["q_proj", "v_proj"]}, {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "all": (
        {"r": 8, "target_modules": "all-linear"},
        {"r": 8, "target_modules": "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj".split()},
    ),
    "ranks": (
        {"r": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}},
        {"r": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}},
    ),
    "layers": (
        {"r": 4, "target_modules": [Q, V, DOWN], "rank_pattern": {DOWN: 6}},
        {"r": 6, "target_modules": [Q, DOWN, V], "rank_pattern": {Q: 4, V: 4}},
    ),
}


def ranks_of(config):
    with torch.device("meta"):
        model = tiny_models.build()
    return adapter_ranks(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)))


@pytest.mark.parametrize("which", CONFIGS)
def test_the_flag_that_an_error_names_makes_the_room_that_the_policy_needs(which, checkpoint):
    config, expected = CONFIGS[which]
    ranks, recipe = ranks_of(config), recipe_for_model(tiny_models.build())
    found = lora_argument(ranks, recipe.linears.values())
    assert json.loads(found) == expected | {"target_modules": sorted(expected["target_modules"])}
    assert ranks_of(json.loads(found)) == ranks
    part = ServedAdapters(found)
    environment = part.environment(recipe, AutoConfig.from_pretrained(checkpoint("qwen3")))
    assert json.loads(environment["TRL_FP8_ADAPTERS"]) == {"linears": [*recipe.linears], "ranks": ranks}


def test_room_that_differs_is_named_by_layer():
    recipe = recipe_for_model(tiny_models.build())
    slots = {Q: [4, 0, 3, [128, 128], 4], V: [4, 2, 3, [64, 128], 0]}  # v is fused with a q that has an adapter
    require_same_ranks("http://server", slots, {Q: 4}, recipe)
    for facts, ranks, message in (
        (
            {},
            {Q: 4},
            "differ in 1 layers: model.layers.0.self_attn.q_proj .4, 0.*--lora '{.r.: 4, .target_modules.: .*q_",
        ),
        (slots, {Q: 4, V: 4}, "differ in 1 layers: model.layers.1.self_attn.v_proj .4, 0"),
        (slots, {Q: 2}, "differ in 1 layers: model.layers.0.self_attn.q_proj .2, 4"),
    ):
        with pytest.raises(ValueError, match=f"fp8_base=True: http://server has other room.*{message}"):
            require_same_ranks("http://server", facts, ranks, recipe)


@pytest.mark.parametrize(
    "lora, message",
    [
        ("r=4", r"--lora 'r=4': .*arguments of PEFT's LoraConfig as JSON"),
        ('{"rank": 4}', "--lora .*unexpected keyword argument 'rank'"),
        ('{"r": 4, "target_modules": ["embed_tokens"]}', "no room for: .*embed_tokens"),
        ('{"r": 4, "target_modules": ["q_proj"], "use_dora": true}', "no room for: .*DoraLinearVariant"),
    ],
)
def test_arguments_that_no_server_has_adapter_ranks_are_refused_at_its_start(lora, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        serve.command([checkpoint("qwen3"), "--lora", lora, "--folder", str(tmp_path)])


def test_a_server_with_room_is_compiled_apart_and_finds_what_to_add(checkpoint, tmp_path):
    words = [checkpoint("qwen3"), "--folder", str(tmp_path), "--max-model-len", "64"]
    keys = []
    for flags in ([], ["--lora", '{"r": 4, "target_modules": ["q_proj"]}']):
        arguments, environment, _ = serve.command(words + flags)
        keys.append(json.loads(arguments[arguments.index("--additional-config") + 1]))
        assert ("TRL_FP8_EXTENSION" in environment) == bool(flags)
    assert keys[0] != keys[1]
