"""Checkpoints of every family of the matrix, and of adapters, read into a model that was initialized otherwise."""

import os
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from testing import other_models, tiny_models
from testing.matrix.families import FAMILIES
from testing.runs import arguments, training
from trl_fp8.policy.stored_weights import (
    load_adapter,
    load_weights,
    unsaved_beside_adapters,
    weight_files,
)


# Families whose checkpoints have other names than the model: its own `load_state_dict` skips those tensors
RENAMED = set(
    "afmoe cohere2_moe deepseek_v2 deepseek_v3 ernie4_5_moe flex_olmo gemma3 glm4_moe glm4_moe_lite granitemoe "
    "granitemoeshared hunyuan_v1_moe hy_v3 mellum minimax_m2 mistral3 mixtral olmoe qwen2_5_vl qwen2_moe qwen2_vl "
    "qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next".split()
)


def stored_and_live(name, folder):
    """A family's checkpoint in `folder`, read by transformers, and another model that holds random numbers."""
    if FAMILIES[name].images:  # their processors need torchvision, their weights do not
        other_models.policy(name).bfloat16().save_pretrained(folder)
    else:
        FAMILIES[name].save(folder)
    kind = AutoModelForImageTextToText if FAMILIES[name].images else AutoModelForCausalLM
    stored = kind.from_pretrained(folder, dtype=torch.float32)
    live = kind.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for tensor in [*live.parameters(), *live.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_()
    return stored, live


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_of_a_family_comes_back_into_the_parameters_that_are_there(name, tmp_path):
    stored, live = stored_and_live(name, tmp_path)
    state = stored.state_dict()
    before, places = dict(live.named_parameters()), {n: p.data_ptr() for n, p in live.named_parameters()}
    initial = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    load_weights(live, tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in live.state_dict().items())
    assert all(not torch.equal(tensor, initial[name]) for name, tensor in live.named_parameters())
    assert all(before[name] is tensor for name, tensor in live.named_parameters())  # an optimizer has them
    assert places == {name: tensor.data_ptr() for name, tensor in live.named_parameters()}
    names = {name for file in weight_files(tmp_path) for name in safe_open(file, "pt").keys()}
    assert (not dict(live.named_parameters()).keys() <= names) == (name in RENAMED)
    stored.save_pretrained(tmp_path / "stored")
    live.save_pretrained(tmp_path / "live")
    written = [load_file(tmp_path / folder / "model.safetensors") for folder in ("stored", "live")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


def test_checkpoints_in_several_files_and_tied_heads_are_read(tmp_path):
    stored, live = (tiny_models.build("qwen3_moe", seed=seed, tied=True) for seed in (0, 1))
    stored.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(weight_files(tmp_path)) > 2
    load_weights(live, tmp_path)
    assert live.lm_head.weight is live.model.embed_tokens.weight
    assert all(torch.equal(p, stored.get_parameter(name)) for name, p in live.named_parameters())


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.2.up_proj.weight", "model.norm.weight"])
def test_a_trained_parameter_that_the_checkpoint_lacks_is_named(name, tmp_path):
    model = tiny_models.build("qwen3_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    lost = re.sub(r"\.\d\.up_proj.weight", ".gate_up_proj", name)
    with pytest.raises(ValueError, match=f"{tmp_path} lacks {lost}, which the run trains"):
        load_weights(model, tmp_path)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if name == "model.norm.weight":  # what is frozen is what the model was started from
        load_weights(model, tmp_path)


@pytest.mark.parametrize("setting", [None, "0"])
def test_the_environment_is_what_it_was_before(setting, tmp_path, monkeypatch):
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    monkeypatch.delenv(name, raising=False) if setting is None else monkeypatch.setenv(name, setting)
    _, live = stored_and_live("qwen3", tmp_path)
    load_weights(live, tmp_path)
    assert os.environ.get(name) == setting


def test_weights_of_another_shape_are_named(tmp_path):
    tiny_models.build("qwen3", vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \[32, 128\], and \[64, 128\] in the model"):
        load_weights(tiny_models.build("qwen3"), tmp_path)


def adapted(**options):
    return get_peft_model(tiny_models.build("qwen3"), LoraConfig(task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"modules_to_save": ["embed_tokens", "norm"]}, {"use_dora": True}, {"trainable_token_indices": [1, 5]}],
    ids=["linears", "modules_to_save", "dora", "tokens"],
)
def test_all_that_peft_trains_is_in_its_checkpoint(options, tmp_path):
    model = adapted(**options)
    model.save_pretrained(tmp_path)
    assert unsaved_beside_adapters(model) == []
    load_adapter(model, tmp_path)
    model.base_model.model.lm_head.weight.requires_grad_()
    assert unsaved_beside_adapters(model) == ["base_model.model.lm_head.weight"]


@pytest.mark.parametrize("name", ["default", "mine"])
def test_the_adapter_that_is_trained_comes_back_beside_others(name, tmp_path):
    """PEFT writes "default" into the folder, and each other adapter into a folder of its own."""
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    models = []
    for seed in (1, 2):
        base = tiny_models.build("qwen3")  # sets a seed, too
        torch.manual_seed(seed)
        models.append(get_peft_model(base, config, adapter_name=name))
        models[-1].add_adapter("ref", config)
    stored, live = models
    stored.save_pretrained(tmp_path)
    weights, before = stored.state_dict(), {key: tensor.clone() for key, tensor in live.state_dict().items()}
    load_adapter(live, tmp_path)
    for key, tensor in live.state_dict().items():
        is_trained = f".lora_A.{name}." in key or f".lora_B.{name}." in key
        assert torch.equal(tensor, (weights if is_trained else before)[key]), key
        assert not is_trained or not torch.equal(tensor, before[key])


def test_a_run_whose_reference_is_a_copy_of_its_adapter_resumes_with_the_adapter(checkpoint, tmp_path):
    """TRL copies the adapter of a `PeftModel` to an adapter "ref" if beta > 0. Without an engine, with FP8 off."""
    flags = {"use_vllm": False, "fp8_weights": False, "kv_cache_dtype": "auto", "beta": 0.1, "learning_rate": 1e-2}
    args = arguments(tmp_path, save_strategy="steps", save_steps=1, **flags)
    weights = []
    for resumed_from in (None, str(tmp_path / "checkpoint-2")):
        torch.manual_seed(0)  # decides the adapter that training starts from
        base = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.float32)
        with training(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")), args) as trainer:
            trainer.train(resume_from_checkpoint=resumed_from)
            state = trainer.model.state_dict()
        weights.append({name: tensor.clone() for name, tensor in state.items() if ".lora_" in name})
    whole, resumed = weights
    assert any(".ref." in name for name in whole)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_an_adapter_of_fewer_modules_is_refused(tmp_path):
    adapted(target_modules=["q_proj"]).save_pretrained(tmp_path)
    model = adapted(target_modules=["q_proj", "v_proj"])
    with pytest.raises(ValueError, match="lacks .*layers.0.self_attn.v_proj.lora_A.weight and 3 more, which the run"):
        load_adapter(model, tmp_path)
