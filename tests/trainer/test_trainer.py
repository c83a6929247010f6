"""`FP8GRPOTrainer` end to end on real engines, and its equality with TRL when everything is off."""

import dataclasses
import inspect
import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer

from testing import engines, tiny_models
from testing.chats import Keypad, chat_tokenizer, chats
from testing.runs import arguments, column, dataset, reward_digits, rows, training
from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.run.launch import check_launch


OFF = {"fp8_weights": False, "kv_cache_dtype": "auto"}


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "beta": 0.04}])
def test_with_every_fp8_flag_off_it_is_trl_bit_for_bit(options, checkpoint, tmp_path):
    results = []
    for config, trainer_class, flags in ((GRPOConfig, GRPOTrainer, {}), (FP8GRPOConfig, FP8GRPOTrainer, OFF)):
        args = arguments(tmp_path / config.__name__, config, max_steps=4, **options, **flags)
        with training(checkpoint("qwen3"), args, trainer_class) as trainer:
            trainer.train()
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        results.append((column(trainer, "loss"), weights))
    (trl_losses, trl_weights), (our_losses, our_weights) = results
    assert trl_losses == our_losses and len(set(our_losses)) > 1
    assert all(torch.equal(trl_weights[name], our_weights[name]) for name in trl_weights)
    start = load_file(f"{checkpoint('qwen3')}/model.safetensors")
    assert not torch.equal(our_weights["lm_head.weight"], start["lm_head.weight"].float())


def test_config_with_flags_off_has_trls_values(tmp_path):
    ours, theirs = arguments(tmp_path, **OFF), arguments(tmp_path, GRPOConfig)
    names = [field.name for field in dataclasses.fields(GRPOConfig) if field.name != "vllm_max_model_length"]
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}


def test_constructor_is_trls():
    ours = list(inspect.signature(FP8GRPOTrainer.__init__).parameters.values())
    theirs = list(inspect.signature(GRPOTrainer.__init__).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.engine
@pytest.mark.parametrize(
    "architecture, options",
    [
        ("qwen3", {}),
        ("qwen3", {"tied": True}),
        ("llama", {}),
        ("llama", {"tied": True}),
        ("qwen2", {}),
        ("qwen3_moe", {}),
    ],
)
def test_architectures_train_three_steps(architecture, options, checkpoint, tmp_path, capfd):
    with training(checkpoint(architecture, **options), arguments(tmp_path)) as trainer:
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        printed = capfd.readouterr().out
        assert "FP8 plan" in printed and "\nLaunch: 1 process\n" in printed
        logged = rows(trainer)
        assert len(logged) == 3 and all(math.isfinite(row["loss"]) for row in logged)
        for row in logged:
            # Random weights are the worst case of FP8: a few percent per operand, two layers. Still a distribution
            # close to the trainer's: a stale or garbled engine is off by whole nats.
            assert 0 < row["sampling/sampling_logp_difference/mean"] < 0.3
            assert 0.9 < row["correction/weight_mean"] < 1.1
            assert row["correction/weight_max"] <= 2.0
            assert row["fp8/sync_seconds"] > 0 and row["fp8/kv_scale_min"] > 0
            assert 0.02 < row["fp8/weight_relative_error"] < 0.03
        assert trainer.vllm_generation.audit_failures == 0
        after = dict(trainer.model.named_parameters())
        assert any(not torch.equal(before[name], after[name]) for name in before)
        assert trainer.vllm_generation.last_sync.fp8_weights == len(trainer.recipe.fp8_modules)


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_trls_four_correction_modes_work(mode, checkpoint, tmp_path):
    args = arguments(tmp_path, vllm_importance_sampling_mode=mode, max_steps=1)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
        row = trainer.state.log_history[0]
        assert row["correction/weight_max"] <= 2.0 and math.isfinite(row["loss"])


@pytest.mark.engine
def test_bf16_rollouts_run_through_the_same_sync_on_cpu(checkpoint, tmp_path):
    with training(checkpoint("qwen3"), arguments(tmp_path, use_vllm=True, max_steps=2, **OFF)) as trainer:
        trainer.train()
        assert trainer.recipe is None and trainer.args.vllm_importance_sampling_mode == "sequence_mask"
        logged = rows(trainer)
        # the same weights in the same type on both sides: BF16 noise of two layers, no FP8
        assert all(row["sampling/sampling_logp_difference/mean"] < 0.02 for row in logged)


@pytest.mark.engine
def test_checkpoints_resume_and_save_model_hold_the_high_precision_policy(checkpoint, tmp_path):
    args = arguments(tmp_path / "run", save_strategy="steps", save_steps=2, max_steps=4)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
        trainer.save_model(str(tmp_path / "final"))
        whole = column(trainer, "loss")
        saved = load_file(tmp_path / "final" / "model.safetensors")
        policy = trainer.model.state_dict()
        assert saved.keys() == policy.keys() and all(torch.equal(saved[name], policy[name]) for name in saved)
        assert "quantization_config" not in json.loads((tmp_path / "final" / "config.json").read_text())
        card = (tmp_path / "run" / "README.md").read_text()
        assert "- fp8" in card and "GRPO" in card
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        resumed = column(trainer, "loss")
        assert len(resumed) == 4 and resumed[:2] == whole[:2] and all(map(math.isfinite, resumed))
        assert trainer.vllm_generation.last_sync is not None


@pytest.mark.engine
def test_evaluation_and_metrics_of_both_modes(checkpoint, tmp_path):
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, max_steps=2, per_device_eval_batch_size=8)
    with training(checkpoint("qwen3"), args, eval_dataset=dataset(4)) as trainer:
        trainer.train()
        evaluated = [row for row in trainer.state.log_history if "eval_reward" in row]
        assert len(evaluated) == 1 and "eval_fp8/sync_seconds" in evaluated[0]


@pytest.mark.engine
def test_a_rollout_function_is_synced_calibrated_and_logged_too(checkpoint, tmp_path):
    def rollout(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        prompt_ids, completion_ids, logprobs, _ = trainer.vllm_generation.generate(ids, None, 1)
        logprobs = [[token[0] for token in sequence] for sequence in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    args = arguments(tmp_path, max_steps=2, kv_scale_margin=2.0)  # nothing saturates, whatever is sampled
    with training(checkpoint("qwen3"), args, rollout_func=rollout) as trainer:
        trainer.train()
        logged = rows(trainer)
        assert all(row["fp8/sync_seconds"] > 0 and row["mismatch/k3_kl"] > 0 for row in logged)
        assert all(row["fp8/kv_saturation_fraction"] == 0 for row in logged)


@pytest.mark.engine
def test_lora_trains_and_adapters_are_unmerged_after_a_broken_sync(checkpoint, tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    with training(checkpoint("qwen3"), arguments(tmp_path), peft_config=lora) as trainer:
        trainer.train()
        assert trainer.vllm_generation.audit_failures == 0
        base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}

        def broken(stream):
            yield from (next(stream) for _ in range(9))
            raise OSError("link down")

        engines.tamper(stream=broken)
        with pytest.raises(OSError, match="link down"):
            trainer.vllm_generation.sync_weights()
        engines.tamper()
        after = dict(trainer.model.named_parameters())
        # merge and unmerge round once each in fp32
        assert all((after[name] - base[name]).abs().max() <= 2**-22 * base[name].abs().max() for name in base)
        assert not any(getattr(module, "merged", False) for module in trainer.model.modules())


def test_trls_config_is_refused_with_the_remedy(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"args is a GRPOConfig.*FP8GRPOConfig\(\.\.\.\)"):
        FP8GRPOTrainer(checkpoint("qwen3"), reward_digits, arguments(tmp_path, GRPOConfig), dataset())


def test_fsdp1_from_the_launcher_is_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_fp8.run.launch.DistributedBackend", lambda accelerator: SimpleNamespace(fsdp_version=1))
    with pytest.raises(
        ValueError, match="fsdp_version: 1 in the accelerate configuration selects FSDP1.*fsdp_version: 2"
    ):
        FP8GRPOTrainer(checkpoint("qwen3"), reward_digits, arguments(tmp_path), dataset())


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 processes, but accelerate formed no group.*use_cpu=True"):
        check_launch(SimpleNamespace(num_processes=1))


def test_processes_that_engines_cannot_share_are_refused(checkpoint, tmp_path):
    with pytest.raises(
        ValueError, match="vllm_tensor_parallel_size=2: .* num_processes=1. Give trl-fp8 train .*--num_processes 2"
    ):
        FP8GRPOTrainer(checkpoint("qwen3"), reward_digits, arguments(tmp_path, vllm_tensor_parallel_size=2), dataset())


def test_tools_are_refused_where_ranks_share_an_engine(checkpoint, tmp_path):
    args = arguments(tmp_path, vllm_tensor_parallel_size=2)
    options = {"train_dataset": chats(), "processing_class": chat_tokenizer(), "environment_factory": Keypad}
    with pytest.raises(ValueError, match="vllm_tensor_parallel_size=2 with tools.* wait for each other forever"):
        FP8GRPOTrainer(checkpoint("qwen3"), None, args, **options)


def test_a_model_that_vllm_cannot_find_is_refused(tmp_path):
    model = tiny_models.build()
    with pytest.raises(ValueError, match="no name_or_path.*save_pretrained"):
        FP8GRPOTrainer(model, reward_digits, arguments(tmp_path), dataset(), processing_class=tiny_models.tokenizer())


def test_a_model_with_nothing_to_quantize_is_refused_before_an_engine_starts(checkpoint, tmp_path):
    small = checkpoint("qwen3", hidden_size=64, intermediate_size=96)
    with pytest.raises(ValueError, match=r"(?s)none of the 15 linear layers .* not a multiple of 128"):
        FP8GRPOTrainer(small, reward_digits, arguments(tmp_path), dataset())
