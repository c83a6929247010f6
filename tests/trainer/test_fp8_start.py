"""Training that starts from an FP8 checkpoint, as published for Qwen3:
it is dequantized, trained, and saved as it is.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing.runs import arguments, training
from trl_fp8.commands.cli import main
from trl_fp8.export.export import export_fp8
from trl_fp8.policy.model import dequantizing_config, in_high_precision
from trl_fp8.recipe.recipe import recipe_for_model


@pytest.fixture
def fp8_checkpoint(checkpoint, tmp_path):
    folder = checkpoint("qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return str(export_fp8(model, AutoTokenizer.from_pretrained(folder), tmp_path / "fp8"))


@pytest.mark.engine
def test_a_run_from_an_fp8_checkpoint_saves_what_it_trained(fp8_checkpoint, tmp_path):
    start = dict(AutoModelForCausalLM.from_pretrained(fp8_checkpoint, dtype=torch.float32).named_parameters())
    with training(fp8_checkpoint, arguments(tmp_path / "run", max_steps=1, bf16=False)) as trainer:
        assert len(trainer.recipe.fp8_modules) == 14 and trainer.model.dtype == torch.float32
        assert all(torch.equal(parameter, start[name]) for name, parameter in trainer.model.named_parameters())
        trainer.train()
        trainer.save_model()
        trained = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    assert any(not torch.equal(parameter, start[name]) for name, parameter in trained.items())
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert stored.keys() == trained.keys()
    assert all(torch.equal(stored[name], trained[name]) for name in trained)
    assert "quantization_config" not in json.loads((tmp_path / "run" / "config.json").read_text())


def test_without_the_repair_transformers_saves_noise(fp8_checkpoint, tmp_path):
    """What `in_high_precision` is for. If this fails, transformers was repaired, and it can go."""
    model = AutoModelForCausalLM.from_pretrained(fp8_checkpoint, dtype=torch.float32)
    expected = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    model.save_pretrained(tmp_path / "broken")
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" in load_file(tmp_path / "broken" / "model.safetensors")
    in_high_precision(model)
    model.save_pretrained(tmp_path / "repaired")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "repaired")
    assert torch.equal(read.model.layers[0].mlp.up_proj.weight, expected)


def test_experts_in_mxfp4_are_dequantized_to_the_policys_dtype_and_saved_as_they_are(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gpt_oss"), tmp_path / "mxfp4")
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        groups = experts, rows, columns // 32
        for part, low, high, shape in ("blocks", 0, 256, (*groups, 16)), ("scales", 118, 122, groups):
            tensors[f"{name}_{part}"] = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))

    stored = dequantizing_config(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=stored)
    in_high_precision(model)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()  # the low one first
    expected = e2m1[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * torch.exp2(scales.float() - 127)[..., None]
    assert torch.equal(model.get_parameter(name), expected.flatten(-2).mT)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == dict(model.named_parameters()).keys()


def test_the_checkpoints_own_skip_list_is_kept_and_other_checkpoints_are_left_alone(fp8_checkpoint, checkpoint):
    config = dequantizing_config(fp8_checkpoint)
    assert config.dequantize and config.modules_to_not_convert == ["lm_head"]
    assert dequantizing_config(checkpoint("qwen3")) is None


def test_scales_of_whole_weights_which_transformers_drops_are_refused(checkpoint, tmp_path, capsys):
    folder = checkpoint("qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    recipe = recipe_for_model(model, kv_cache_dtype="auto", weight_format="tensor")
    made = str(export_fp8(model, AutoTokenizer.from_pretrained(folder), tmp_path / "tensor", recipe=recipe))
    read = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    noise, weight = (one.model.layers[0].mlp.up_proj.weight.float() for one in (read, model))
    assert (noise - weight).norm() > weight.norm()  # if this fails, transformers was repaired: do not refuse it
    with pytest.raises(ValueError, match="one scale per weight .*Start from the high-precision checkpoint"):
        dequantizing_config(made)
    assert main(["export", made, str(tmp_path / "again")]) == 2
    assert "one scale per weight" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_a_model_in_fp8_is_refused_with_the_remedy(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*dequantize=True"):
        in_high_precision(model)
