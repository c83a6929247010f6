"""The table of model types against the classes of transformers; `tests/engine/test_servable.py` has vLLM's."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from testing import other_models
from trl_fp8.features.router_replay.replay import RouterReplay
from trl_fp8.recipe.families import FAMILIES, family_of, types_with
from trl_fp8.recipe.from_model import outline_of


def on_meta(model_type):
    config = other_models.config(model_type)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def test_rows_are_in_order_and_of_types_that_transformers_has():
    assert list(FAMILIES) == sorted(FAMILIES)
    assert set(FAMILIES) <= set(CONFIG_MAPPING)
    assert not family_of("a type of tomorrow").tested


@pytest.mark.parametrize("model_type", types_with("tested"))
def test_rows_agree_with_the_models_that_transformers_builds(model_type):
    model, family = on_meta(model_type), FAMILIES[model_type]
    config, outline = model.config.get_text_config(), outline_of(model)
    parameters = outline.parameters
    assert family.sinks >= any(name.endswith(".sinks") for name in parameters)
    balanced = getattr(config, "output_router_logits", None) is not None and getattr(config, "router_aux_loss_coef", 0)
    assert family.experts_counted == (hasattr(config, "num_experts") or not balanced)
    if outline.top_k_routers:
        assert RouterReplay(model).layers
    for name, _ in family.stored:
        assert model_type == "gemma3_text" or any(name in parameter for parameter in parameters)
    for end in family.fp32:
        assert any(parameter.endswith(end) for parameter in parameters)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "model_type, overrides, field, expected",
    [
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 2}, "n_group", 1),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2}, "n_group", None),
        ("deepseek_v3", {}, "topk_method", "noaux_tc"),
        (
            "glm4_moe_lite",
            {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "dense", "sparse"]},
            "first_k_dense_replace",
            2,
        ),
        ("minimax_m2", {"rope_parameters": ROPE}, "rotary_dim", 32),
        ("qwen3", {}, "scoring_func", None),
    ],
)
def test_an_engine_is_told_what_transformers_does_whatever_a_config_says(model_type, overrides, field, expected):
    config = other_models.config(model_type, **overrides).to_dict()
    assert family_of(model_type).engine_fields(config).get(field) == expected


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_channels_that_vllm_would_turn_otherwise_are_refused(model_type):
    config = other_models.config(model_type).to_dict() | {"rope_interleave": False}
    with pytest.raises(ValueError, match=f"'{model_type}' with rope_interleave=False.*rope_interleave=True"):
        family_of(model_type).engine_fields(config)
