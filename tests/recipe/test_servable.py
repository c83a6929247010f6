"""Models that no engine can serve are refused from their names, and every remedy that a refusal names gets further."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, GenerationConfig

from testing import other_models, published, tiny_models
from trl_fp8 import FP8GRPOConfig
from trl_fp8.commands.cli import main
from trl_fp8.engine.vllm.platform import Cuda
from trl_fp8.features.kv_cache.kv_cache_flags import KVCacheFlags
from trl_fp8.recipe import servable
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.recipe import recipe_for
from trl_fp8.run import engine_flags as engine


def outline(config):
    with torch.device("meta"):
        return outline_of(AutoModelForCausalLM.from_config(config))


def refusal(call, *args, **options) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    return str(error.value)


def flags_in(message: str) -> dict:
    """The flags that a message names, with their values."""
    return {name: eval(value) for name, value in re.findall(r"(\w+)=(True|False|'\w+')", message)}


@pytest.fixture
def without_vllm(monkeypatch):
    """A plan asks vLLM where it is installed, which takes seconds; what is refused without it must not need it."""
    monkeypatch.setattr("trl_fp8.commands.plan_command.find_spec", lambda name: None)


@pytest.mark.parametrize("gpus", ["1", "8"])
def test_a_plan_of_a_model_without_layers_is_one_line(gpus, tmp_path, capsys):
    config = published.CONFIGS["Qwen/Qwen3-8B"] | {"num_hidden_layers": 0, "max_window_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--gpus", gpus]) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("trl-fp8: ")]
    assert out == "" and "num_hidden_layers=0" in line


@pytest.mark.parametrize(
    "model_type, named",
    [
        ("gpt_bigcode", "q, k, v as one tensor"),
        ("gpt_neox", "q, k, v as one tensor"),
        ("llama4_text", "permutes the rows"),
        ("lfm2_moe", "without ordinary attention"),
        ("nemotron_h", "without ordinary attention"),
        ("mamba", "without ordinary attention"),
    ],
)
@pytest.mark.parametrize("cache", ["fp8", "auto"])
def test_a_plan_refuses_what_the_trainer_would_in_one_line(model_type, named, cache, tmp_path, capsys, without_vllm):
    other_models.config(model_type).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--kv-cache-dtype", cache]) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("trl-fp8: ")]
    assert out == "" and named in line and f"type '{model_type}'" in line and f"{servable.REMEDY}." in line


def test_a_plan_asks_vllm_for_classes_that_it_does_not_know_itself(tmp_path, capsys):
    other_models.config("helium").save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path)]) == 2
    assert "knows no class for HeliumForCausalLM" in capsys.readouterr().err
    other_models.config("seed_oss").save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path)]) == 0


def test_a_plan_runs_no_code_of_a_model(tmp_path, capsys):
    mapped = {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.MyForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": mapped}))
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    assert main(["plan", str(tmp_path)]) == 2
    assert "'mine' bring their own code" in capsys.readouterr().err


def test_layers_of_several_head_sizes_are_refused():
    sizes = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    sizes |= dict(head_dim=64, vocab_size_per_layer_input=256, hidden_size_per_layer_input=64, num_kv_shared_layers=0)
    layers = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    assert outline(Gemma4TextConfig(**sizes, **layers, global_head_dim=64)).head_dim == 64
    made = outline(Gemma4TextConfig(**sizes, **layers, global_head_dim=128))
    assert (made.kv_heads, made.head_dim) == (0, 0)
    assert "heads of several numbers or sizes" in refusal(servable.require_servable, made)


def test_vllms_registry_goes_before_the_lists():
    made = outline(tiny_models.config("qwen3"))
    assert servable.why_not_servable(made, lambda names: names[0]) is None
    assert "transformers backend" in servable.why_not_servable(made, lambda names: "TransformersForCausalLM")
    assert "knows no class for Qwen3ForCausalLM" in servable.why_not_servable(made, lambda names: None)


def test_published_models_are_refused_for_what_they_are():
    outlines = {name: published.outline(name) for name in published.CONFIGS}
    reasons = {name: reason for name, made in outlines.items() if (reason := servable.why_not_servable(made))}
    assert reasons == {}
    biased = [name for name, made in outlines.items() if any("k_proj.bias" in key for key in made.parameters)]
    assert biased == ["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-72B", "openai/gpt-oss-20b"]


def test_a_model_without_a_linear_for_fp8_is_planned_without_unless_it_is_asked_for(tmp_path, capsys, without_vllm):
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["openai/gpt-oss-20b"]))
    assert main(["plan", str(tmp_path)]) == 0
    assert "--fp8_weights False" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--weight-format", "tensor"]) == 0
    assert "--fp8_weight_format tensor" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--weight-format", "blocks"]) == 2
    assert "Set fp8_weight_format='tensor', or fp8_weights=False, or take another model." in capsys.readouterr().err


def test_vision_towers_are_neither_quantized_nor_accused():
    made = outline(other_models.config("gemma3"))
    assert servable.why_not_servable(made) is None
    assert (made.config_type, made.model_type, made.decoder) == ("gemma3", "gemma3_text", "model.language_model")
    recipe = recipe_for(made)
    kept = [name for name, reason in recipe.kept_modules.items() if reason == "vision tower"]
    assert len(kept) == 12 and all(name.startswith("model.vision_tower.encoder.layers.") for name in kept)
    assert len(recipe.fp8_modules) == 14
    assert any(name.endswith("k_proj.bias") for name in made.parameters)
    args, biased = FP8GRPOConfig("run", use_cpu=True, bf16=False), outline(tiny_models.config("qwen2"))
    assert KVCacheFlags.risks(args, made, recipe) == []
    assert "biases" in KVCacheFlags.risks(args, biased, recipe_for(biased))[0].text


def test_modules_that_are_named_otherwise_are_called_so():
    reason = "not named as a projection of Llama's decoder layers"
    said = refusal(recipe_for, outline(other_models.config("nemotron_h")))
    assert "in_proj" in said.partition(f" ({reason})")[0].rpartition("; ")[2]
    assert recipe_for(outline(other_models.config("phi"))).kept_modules["model.layers.0.mlp.fc1"] == reason


def test_remedies_of_a_model_that_has_nothing_to_quantize():
    small = outline(tiny_models.config(hidden_size=64, intermediate_size=96))
    message = refusal(recipe_for, small)
    assert "tensor_parallel_size" not in message
    remedies = flags_in(message.partition("Set ")[2])
    assert recipe_for(small, weight_format=remedies.pop("fp8_weight_format")).fp8_weights
    assert recipe_for(small, **remedies).fp8_kv_cache
    split = outline(tiny_models.config())
    message = refusal(recipe_for, split, tensor_parallel_size=4)
    assert "Set vllm_tensor_parallel_size=1 or 2, or" in message
    assert recipe_for(split, tensor_parallel_size=2).fp8_weights
    assert recipe_for(split, tensor_parallel_size=4, fp8_weights=False).fp8_kv_cache


def test_remedies_of_flags_lead_to_a_config_that_starts(tmp_path):
    made = FP8GRPOConfig(str(tmp_path), use_cpu=True, **flags_in(servable.REMEDY))
    assert not made.own_engine and not made.use_vllm and flags_in(servable.REMEDY) == servable.WITHOUT_ENGINE
    tiny = outline(tiny_models.config())
    assert not recipe_for(tiny, **flags_in(refusal(recipe_for, tiny, kv_cache_skip_layers=(0, 1)))).fp8_kv_cache
    sizes = {"max_num_seqs": 8, "max_model_len": 64}
    ampere = Cuda((8, 0))
    message = refusal(ampere.arguments, recipe_for(tiny), tiny_models.config(), **sizes)
    off = recipe_for(tiny, **flags_in(message.rpartition("Switch")[2]))
    overrides = ampere.arguments(off, tiny_models.config(), **sizes)["hf_overrides"]
    assert overrides["quantization_config"] is None


@pytest.mark.parametrize("flags", [{}, {"fp8_weights": False, "kv_cache_dtype": "auto", "router_replay": "rollout"}])
def test_the_fallback_as_a_flag_is_refused_wherever_the_engine_is_ours(flags, tmp_path):
    flags = {"use_cpu": True, "use_vllm": True, "vllm_mode": "colocate"} | flags
    message = refusal(FP8GRPOConfig, str(tmp_path), **flags, vllm_model_impl="transformers")
    assert FP8GRPOConfig(str(tmp_path), **flags, **flags_in(message.rpartition("Set")[2])).own_engine


def test_generation_kwargs_have_vllms_names(tmp_path):
    assert "do_sample" in refusal(FP8GRPOConfig, str(tmp_path), use_cpu=True, generation_kwargs={"do_sample": True})
    both = {"max_new_tokens": 8, "stop_strings": ["x"], "num_beams": 2}
    message = refusal(FP8GRPOConfig, str(tmp_path), use_cpu=True, generation_kwargs=both)
    assert "['max_new_tokens', 'stop_strings', 'num_beams']" in message and "max_completion_length" in message
    as_advised = {"max_completion_length": 8, "generation_kwargs": {"stop": ["x"], "temperature": 1.0}}
    assert FP8GRPOConfig(str(tmp_path), use_cpu=True, **as_advised).generation_kwargs["stop"] == ["x"]
    FP8GRPOConfig(str(tmp_path), use_cpu=True, **servable.WITHOUT_ENGINE, generation_kwargs={"do_sample": True})


@pytest.mark.parametrize(
    "given, said",
    [
        ({"seed": 3}, "all completions of a prompt would be the same"),
        ({"n": 2, "logprobs": None}, r"\['n', 'logprobs'\], which the trainer sets itself"),
        ({"temperature": 0.5}, "Set temperature=0.5 in the config instead"),
    ],
)
def test_generation_kwargs_that_the_trainer_sets_are_refused(given, said, tmp_path):
    assert re.search(said, refusal(FP8GRPOConfig, str(tmp_path), use_cpu=True, generation_kwargs=given))
    FP8GRPOConfig(str(tmp_path), use_cpu=True, temperature=0.5, generation_kwargs={"temperature": 0.5})


def test_advised_arguments_are_known_to_trl_or_vllm():
    assert set(engine._INSTEAD) <= set(GenerationConfig().to_dict()) - set(engine.VLLM_NAMES)
    for words in engine._INSTEAD.values():
        name, _, given = words.partition("=")
        assert name in FP8GRPOConfig.__dataclass_fields__
        assert not given or re.search(r"'(\w+)'", given)[1] in engine.VLLM_NAMES
