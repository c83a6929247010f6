"""Policies that no engine can follow are refused before one is started."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from vllm.config import ModelConfig

from testing import tiny_models
from testing.hub_cache import COMMITS, KEEPS_COMMITS, NAME, write_repository
from trl_fp8.recipe.from_model import outline_of, outline_of_pretrained
from trl_fp8.recipe.servable import require_same_positions
from trl_fp8.sync.policy_checks import require_servable
from trl_fp8.upstream.vllm import engine_class


def test_a_policy_that_is_quantized_already_is_refused_with_what_to_do(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    require_servable(model, engine_class)
    model.is_quantized = True  # as bitsandbytes' quantizer leaves it
    with pytest.raises(ValueError, match="QLoRA.*use LoRA on an FP8 base .fp8_base=True"):
        require_servable(model, engine_class)


def test_added_tokens_are_refused_until_the_resized_model_is_stored(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    before = model.config.vocab_size
    model.resize_token_embeddings(before + 3)
    for policy in (model, get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))):
        with pytest.raises(
            ValueError, match=f"has {before + 3} tokens, {checkpoint('qwen3')} has {before}.*pass that"
        ):
            require_servable(policy, engine_class)
    policy.unload().save_pretrained(tmp_path)
    require_servable(AutoModelForCausalLM.from_pretrained(tmp_path), engine_class)


@pytest.mark.skipif(not KEEPS_COMMITS, reason="this version of transformers keeps no commits")
def test_a_policy_of_an_older_commit_is_compared_with_that_commit(checkpoint, tmp_path, monkeypatch):
    load = AutoModelForCausalLM.from_pretrained
    resized = load(checkpoint("qwen3"))
    resized.resize_token_embeddings(resized.config.vocab_size + 3)
    resized.save_pretrained(tmp_path / "resized")
    write_repository([checkpoint("qwen3"), tmp_path / "resized"], tmp_path / "cache", monkeypatch)
    require_servable(load(NAME, revision=COMMITS[0]), engine_class)
    require_servable(load(NAME), engine_class)


def test_an_engine_that_turns_short_sequences_by_long_factors_is_refused():
    factors = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    model = outline_of(tiny_models.on_meta("phi3", rope_parameters=rope, original_max_position_embeddings=64))
    require_same_positions(model, 64)
    for longest in (65, None):
        with pytest.raises(
            ValueError, match=f"vllm_max_model_length={longest} with a 'phi3' model.*length=64 or less"
        ):
            require_same_positions(model, longest)
    require_same_positions(outline_of(tiny_models.on_meta("phi3")), None)


def test_sequences_longer_than_the_models_positions_are_refused_before_an_engine_is():
    outline = outline_of(tiny_models.on_meta(max_position_embeddings=128))
    require_same_positions(outline, 128)
    with pytest.raises(ValueError, match="vllm_max_model_length=129, .* max_position_embeddings=128.*=128 or less"):
        require_same_positions(outline, 129)


@pytest.mark.parametrize("kind, served", [("linear", 256), ("dynamic", 128), ("llama3", 128), ("yarn", 128)])
def test_stretched_positions_are_refused_where_an_engine_does_not_serve_them(kind, served, checkpoint):
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, **factors}
    model = checkpoint("llama", max_position_embeddings=128, rope_parameters=rope)
    outline = outline_of_pretrained(model)
    require_same_positions(outline, served)
    ModelConfig(model, max_model_len=served)
    with pytest.raises(ValueError, match=f"vllm_max_model_length={served + 1}.*_embeddings=128.*={served} or less"):
        require_same_positions(outline, served + 1)
    if kind != "dynamic":  # vLLM makes angles for 256 tokens, which the policy turns otherwise
        with pytest.raises(ValueError, match="max_model_len"):
            ModelConfig(model, max_model_len=served + 1)
