"""What is written, loaded and scored beside an FP8 base that trainer and engine share."""

import gc
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from testing.runs import arguments, column, dataset, reward_digits, training
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.export.file_checksums import verify_export
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_weight


pytestmark = pytest.mark.engine
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM", "lora_alpha": 5, "use_rslora": True}


def policy(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def on_codes(folder, recipe):
    """The model with each FP8 weight as its codes have it."""
    model = policy(folder)
    for name in recipe.fp8_tensors:
        weight = model.get_parameter(name)
        weight.data = dequantize_weight(quantize_weight(weight.data.bfloat16()), torch.float32)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 27).view(2, 12)).logits


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    """(trainer after three steps, folder of its base, folder of the run). The rewards of evaluations fall."""
    gc.collect()  # as in tests/features/shared_base/test_stock_lora.py
    folder, out = checkpoint("qwen3"), tmp_path_factory.mktemp("run")
    flags = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    flags |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    flags |= {"per_device_eval_batch_size": 4, "beta": 0.02, "learning_rate": 1e-2, "bf16": False}

    def falling(completions, trainer_state, **kwargs):
        digits = [sum(c.isdigit() for c in text) / 8 for text in completions]
        return [reward - trainer_state.global_step for reward in digits]

    args = arguments(out, fp8_base=True, **flags)
    options = {"peft_config": LoraConfig(**LORA), "reward_funcs": falling, "eval_dataset": dataset(2)}
    with training(policy(folder), args, **options) as trainer:
        trainer.train()
        yield trainer, folder, out


def adapters_of(model):
    return {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if ".lora_" in name}


def test_the_best_checkpoint_is_loaded_at_the_end(run):
    trainer, _, out = run
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-1"
    found = adapters_of(trainer.model)
    best, last = (load_file(out / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (1, 3))
    assert found.keys() == best.keys() and all(torch.equal(found[name], best[name]) for name in found)
    assert not any(torch.equal(found[name], last[name]) for name in found)
    trainer.evaluate()
    held = trainer.vllm_generation.engine.layout.held["model.layers.1.mlp.up_proj.lora_B.weight"]
    [loaded] = [best[name] for name in best if "layers.1.mlp.up_proj.lora_B" in name]
    assert torch.equal(held[:, 4:], (loaded * 5 / 2).bfloat16())  # up comes after gate; scaled by alpha / sqrt(r)


def test_saved_are_adapters_of_the_original_model(run, tmp_path):
    trainer, folder, _ = run
    trainer.save_model(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == folder
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]
    trained = logits(trainer.model)
    shared, original, bf16 = (
        logits(PeftModel.from_pretrained(base, tmp_path))
        for base in (on_codes(folder, trainer.recipe), policy(folder), policy(folder, torch.bfloat16))
    )
    assert torch.equal(trained, shared)
    # e4m3 moves weights by 2.7 %, BF16 by 0.2 %
    assert 0.01 < (trained - original).norm() / original.norm() < 0.15
    assert 0.001 < (bf16 - original).norm() / original.norm() < 0.03


def test_the_reference_is_the_base_as_it_is_shared(run):
    trainer, folder, _ = run
    kl = column(trainer, "kl")
    assert kl[0] == 0 and min(kl[1:]) > 1e-4
    with trainer.model.disable_adapter():
        reference = logits(trainer.model)
    assert torch.equal(reference, logits(on_codes(folder, trainer.recipe)))
    assert not torch.equal(reference, logits(trainer.model))


def test_adapters_are_merged_into_the_original_weights(run, tmp_path, caplog):
    trainer, folder, _ = run
    trainer.merge_and_export(tmp_path / "bf16")
    trainer.save_fp8_model(tmp_path / "fp8")
    assert verify_export(tmp_path / "bf16") >= 5
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    merged = PeftModel.from_pretrained(policy(folder), trainer.state.best_model_checkpoint).merge_and_unload()
    exported, fp8 = (policy(tmp_path / each, torch.bfloat16).state_dict() for each in ("bf16", "fp8"))
    for name, original in policy(folder).state_dict().items():
        expected, found = merged.state_dict()[name].bfloat16(), exported[name]
        # PEFT scales B A, not B: FP32 sums of less than 1 that differ in their last bits are seldom two in BF16
        assert ((found - expected).abs() <= 2**-7 * expected.abs() + 2**-22).all(), name
        assert (found != expected).float().mean() < 1e-3, name
        assert torch.equal(found, original.bfloat16()) != any(kind in name for kind in TARGETS), name
        if name in trainer.recipe.fp8_tensors:
            found = dequantize_weight(quantize_weight(found), torch.bfloat16)
        assert torch.equal(fp8[name], found), name
    for each, section in (("bf16", "## Merged checkpoint"), ("fp8", "## FP8 checkpoint")):
        card = (tmp_path / each / "README.md").read_text()
        assert f"{section}\n\nAdapters are merged into the original weights: W + s B A, in FP32." in card
    assert "adapters are merged" not in caplog.text


def test_without_the_original_weights_adapters_are_merged_into_what_the_engine_holds(
    run, tmp_path, monkeypatch, caplog
):
    trainer, folder, _ = run
    monkeypatch.setattr(trainer.vllm_generation.weights.base, "_original", None)
    with monkeypatch.context() as moved:
        moved.setattr(trainer.model.config, "_name_or_path", str(tmp_path / "gone"))
        trainer.merge_and_export(tmp_path / "bf16")
    assert "merge_and_export: adapters are merged into dequantized FP8 weights, because the original" in caplog.text
    assert "Adapters are merged into dequantized FP8 weights:" in (tmp_path / "bf16" / "README.md").read_text()
    base = on_codes(folder, trainer.recipe)
    merged = PeftModel.from_pretrained(base, trainer.state.best_model_checkpoint).merge_and_unload().state_dict()
    exported = policy(tmp_path / "bf16", torch.bfloat16).state_dict()
    assert all((exported[name] != merged[name].bfloat16()).float().mean() < 1e-3 for name in merged)


def test_weights_of_another_model_are_not_merged_with_its_adapters(run, checkpoint, tmp_path, monkeypatch):
    trainer, _, _ = run
    another = policy(checkpoint("qwen3"))
    another.model.layers[1].mlp.down_proj.weight.data.mul_(3)
    another.save_pretrained(tmp_path / "another")
    monkeypatch.setattr(trainer.vllm_generation.weights.base, "_original", None)
    monkeypatch.setattr(trainer.model.config, "_name_or_path", str(tmp_path / "another"))
    with pytest.raises(
        RuntimeError, match=r"not those that the adapters were trained on: model\.layers\.1\.mlp\.down_proj\.weight"
    ):
        trainer.merge_and_export(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("how", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("safe", [False, True])
def test_pefts_own_merge_names_what_merges(how, safe, run):
    trainer, _, _ = run
    before = logits(trainer.model)
    with pytest.raises(ValueError, match=r"fp8_base=True: .* Use trainer\.merge_and_export"):
        getattr(trainer.model, how)(safe_merge=safe)
    assert torch.equal(logits(trainer.model), before)


def test_the_card_says_what_was_trained_and_what_a_sync_sent(run):
    trainer, _, out = run
    trainer.create_model_card()
    card = (out / "README.md").read_text()
    assert "a vLLM engine that got adapters at every step" in card
    assert "| trainer | as TRL computes, on the engine's FP8 base;" in card
    assert "| adapters | beside FP8 weights that engine and trainer share, not merged: Q(W) x + s B A x |" in card
    assert "14 linear layers, 95.8% of parameters: e4m3 in 128x128 blocks, pow2 scales, written once |" in card
    sent = column(trainer, "fp8/sync_bytes")
    written = f"| bytes that a sync wrote, last {len(sent)} logged steps | {sum(sent) / len(sent):.3g} |"
    assert sent and written in card


def test_trls_copy_of_an_adapter_is_the_reference(checkpoint, tmp_path):
    """A `PeftModel` is trained against the adapter that it came with; a third one has no part in it."""
    model = get_peft_model(policy(checkpoint("qwen3")), LoraConfig(**LORA, init_lora_weights=False))
    model.add_adapter("idle", LoraConfig(r=8, target_modules=["k_proj", "up_proj"], init_lora_weights=False))
    before = logits(model)
    args = arguments(tmp_path, fp8_base=True, beta=0.1, max_steps=2, learning_rate=1e-2, bf16=False)
    with training(model, args) as trainer:
        assert "ref" in trainer.model.peft_config
        trainer.train()
        kl, mismatch = column(trainer, "kl"), column(trainer, "mismatch/logp_difference_mean")
        assert kl[0] == 0 and kl[1] > 1e-4 and max(mismatch) < 0.2, (kl, mismatch)
        trained = logits(trainer.model)
        trainer.model.set_adapter("ref")
        reference = logits(trainer.model)
    assert (reference - before).norm() < 0.15 * before.norm() < (trained - before).norm()


def test_adapters_that_are_merged_or_whole_modules_of_another_name_are_refused(checkpoint, tmp_path):
    args = arguments(tmp_path, fp8_base=True)
    model = get_peft_model(policy(checkpoint("qwen3")), LoraConfig(**LORA))
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into the base: .*q_proj.* Call model\.unmerge_adapter\(\) first"):
        FP8GRPOTrainer(model, reward_digits, args, dataset())
    model.unmerge_adapter()  # the model is whole
    config = LoraConfig(**LORA, modules_to_save=["norm"])
    model = get_peft_model(policy(checkpoint("qwen3")), config, adapter_name="mine")
    with pytest.raises(ValueError, match=r"modules_to_save of an adapter called mine.* Give it that name"):
        FP8GRPOTrainer(model, reward_digits, args, dataset())
