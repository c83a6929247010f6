"""FP8 checkpoints on disk: what vLLM and transformers make of them, and that a broken one is found."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing import engines, other_models, tiny_models
from testing.reference_experts import reference_fp8_experts
from testing.runs import arguments, training
from trl_fp8.export.export import INDEX, export_fp8
from trl_fp8.export.file_checksums import CHECKSUMS, verify_export
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_weight
from trl_fp8.recipe.recipe import recipe_for_model


@pytest.mark.engine
@pytest.mark.parametrize(
    "architecture, options",
    [("qwen3", {"tied": True}), ("llama", {}), ("qwen2", {}), ("qwen3", {"intermediate_size": 192})],
    ids=["qwen3-tied", "llama", "qwen2", "partly-aligned"],
)
def test_vllm_loads_what_the_engine_was_sent(architecture, options, checkpoint, tmp_path):
    scales = engines.some_scales(2, 1)
    generation = engines.start(checkpoint(architecture, **options), scales)
    engines.perturb(generation.model, seed=1)
    generation.sync_weights()
    synced = engines.log_probs(generation.llm)
    engines.shutdown(generation.llm)
    folder = export_fp8(generation.model, generation.processing_class, tmp_path / "fp8", scales)
    assert engines.loaded_log_probs(folder, generation.recipe, generation.pinned) == synced
    assert verify_export(folder) >= 5


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_experts_are_written_one_by_one_and_vllm_loads_them(architecture, checkpoint, tmp_path):
    scales = engines.some_scales(2, 1)
    with reference_fp8_experts():
        generation = engines.start(checkpoint(architecture), scales, expert_kernels=True)
    generation.sync_weights()
    synced = engines.log_probs(generation.llm)
    engines.shutdown(generation.llm)
    folder = export_fp8(generation.model, generation.processing_class, tmp_path / "fp8", scales)
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    one = "block_sparse_moe.experts.3.w1" if architecture == "mixtral" else "mlp.experts.3.gate_proj"
    assert {f"model.layers.1.{one}.weight", f"model.layers.1.{one}.weight_scale_inv"} <= names.keys()
    with reference_fp8_experts():
        assert engines.loaded_log_probs(folder, generation.recipe, generation.pinned) == synced


def test_a_link_to_an_empty_folder_is_a_folder(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    export_fp8(model, AutoTokenizer.from_pretrained(checkpoint("qwen3")), tmp_path / "link")
    assert verify_export(tmp_path / "disk") >= 5 and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2"])
def test_transformers_reads_the_dequantized_weights(architecture, checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint(architecture), dtype=torch.float32)
    engines.perturb(model, seed=1)
    recipe = recipe_for_model(model, kv_cache_dtype="auto")
    export_fp8(model, AutoTokenizer.from_pretrained(checkpoint(architecture)), tmp_path / "fp8")
    read = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16).named_parameters())
    assert read.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        expected = parameter.detach().bfloat16()
        if name in recipe.fp8_tensors:
            expected = dequantize_weight(quantize_weight(expected), torch.bfloat16)
        assert torch.equal(read[name], expected), name


@pytest.fixture
def small(checkpoint):
    folder = checkpoint("qwen3")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_shards_hold_each_tensor_once_and_a_weight_with_its_scale(small, tmp_path):
    folder = export_fp8(*small, tmp_path / "fp8", shard_bytes=60_000)
    index = json.loads((folder / INDEX).read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 5 and [file.name for file in files] == sorted(set(index["weight_map"].values()))
    held, size = {}, 0
    for file in files:
        with safe_open(file, "pt") as shard:
            held |= dict.fromkeys(shard.keys(), file.name)
            size += sum(shard.get_tensor(name).nbytes for name in shard.keys())
    assert held == index["weight_map"] and size == index["metadata"]["total_size"]
    for name in held:
        if name.endswith("_scale_inv"):
            assert held[name] == held[name.removesuffix("_scale_inv")]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "bfloat16"
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_an_export_holds_whatever_the_policys_state_dict_holds(architecture, checkpoint, tmp_path):
    """Up to scales, and with experts one by one."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(architecture), dtype=torch.float32)
    folder = export_fp8(model, tiny_models.tokenizer(), tmp_path / "fp8")
    held = json.loads((folder / INDEX).read_text())["weight_map"]
    fused = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
    fused |= {"down_proj": "down_proj", "w2": "down_proj"}

    def policys(name):
        name = name.replace(".block_sparse_moe.", ".mlp.")
        return re.sub(r"\.experts\.\d+\.(\w+)\.weight$", lambda part: f".experts.{fused[part[1]]}", name)

    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert {policys(name) for name in held if not name.endswith("_scale_inv")} == model.state_dict().keys() - tied


def test_a_corrupted_or_missing_file_is_named(small, tmp_path):
    folder = export_fp8(*small, tmp_path / "fp8", shard_bytes=200_000)
    files = sorted(folder.glob("*.safetensors"))
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    with pytest.raises(ValueError, match=rf"as it was exported: {files[1].name} \(changed\)\. "):
        verify_export(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=rf"config\.json \(missing\), {files[1].name} \(changed\)"):
        verify_export(folder)
    (folder / CHECKSUMS).unlink()
    with pytest.raises(ValueError, match="not written by export_fp8, or not completely"):
        verify_export(folder)


def test_files_beside_an_export_are_named(small, tmp_path):
    """vLLM would load a model.safetensors that lies beside the shards."""
    folder = export_fp8(*small, tmp_path / "fp8")
    (folder / ".cache").mkdir()
    for name in (".gitattributes", ".cache/of_a_hub_client"):
        (folder / name).touch()
    assert verify_export(folder) > 3
    (folder / "original").mkdir()
    for name in ("model.safetensors", "original/weights.bin"):
        (folder / name).touch()
    with pytest.raises(ValueError, match=r"not exported: model\.safetensors, original/weights\.bin\. A loader"):
        verify_export(folder)


def test_a_failed_export_leaves_nothing(small, tmp_path):
    model, tokenizer = small

    class Broken:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export_fp8(model, Broken(), tmp_path / "fp8")
    assert list(tmp_path.iterdir()) == []
    export_fp8(model, tokenizer, tmp_path / "fp8")
    with pytest.raises(ValueError, match="is not empty"):
        export_fp8(model, tokenizer, tmp_path / "fp8")


def test_policies_that_would_be_written_wrong_are_refused(small, tmp_path):
    model, tokenizer = small
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        export_fp8(model, tokenizer, tmp_path / "fp8")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="trainer.save_fp8_model"):
        export_fp8(adapted, tokenizer, tmp_path / "fp8")


@pytest.mark.engine
@pytest.mark.parametrize(
    "lora", [None, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)], ids=["all", "LoRA"]
)
def test_a_trainers_export_is_what_its_engine_holds(lora, checkpoint, tmp_path, monkeypatch):
    with training(checkpoint("qwen3"), arguments(tmp_path / "run", max_steps=1), peft_config=lora) as trainer:
        with pytest.raises(ValueError, match="there was none. Train first"):
            trainer.save_fp8_model(tmp_path / "early")
        trainer.train()
        trainer.vllm_generation.sync_weights()
        held = engines.log_probs(trainer.vllm_generation.llm)
        another_rank = SimpleNamespace(reduce_max=lambda bad: bad.fill_(1.0))  # it saw a NaN where this one did not
        with monkeypatch.context() as ranks, pytest.raises(ValueError, match="NaN or infinite"):
            ranks.setattr(trainer.vllm_generation, "replicas", another_rank)
            trainer.save_fp8_model(tmp_path / "nan")
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.save_fp8_model(tmp_path / "fp8")
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        with pytest.raises(RuntimeError, match="main process could not write the export: .*is not empty"):
            trainer.save_fp8_model(tmp_path / "fp8")
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())  # adapters unmerged
    assert engines.loaded_log_probs(tmp_path / "fp8", trainer.recipe, trainer.vllm_generation.pinned) == held


def test_blocks_that_vllm_could_not_read_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="type 'mistral3'.*--weight-format tensor"):
        export_fp8(other_models.policy("mistral3"), None, tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()
