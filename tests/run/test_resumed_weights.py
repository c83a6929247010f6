"""Resumed runs, and those that load their best model at the end, have every weight of the checkpoint."""

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from testing import runs, vision
from testing.fake_rollout_engine import FakeEngineTrainer
from testing.matrix.families import FAMILIES
from testing.runs import arguments, dataset, reward_digits, training, trajectory
from trl_fp8 import FP8GRPOTrainer


NAMES = ["deepseek_v3", "gemma3", "gpt_oss", "qwen3_moe"]
WITH_FAKE = {"kv_cache_dtype": "auto", "num_iterations": 2}
WITHOUT_ENGINE = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": False}


def cloned(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "name, flags", [*((name, WITH_FAKE) for name in NAMES if name != "gemma3"), ("gemma3", WITHOUT_ENGINE)]
)
def test_a_resumed_run_ends_where_the_whole_one_did(name, flags, tmp_path, capsys):
    FAMILIES[name].save(tmp_path / "policy")
    args = arguments(tmp_path / "run", max_steps=4, save_strategy="steps", save_steps=1, **flags)
    task = (
        (vision.reward_digits, args, vision.dataset()) if FAMILIES[name].images else (reward_digits, args, dataset())
    )
    trainer = FakeEngineTrainer if args.use_vllm else FP8GRPOTrainer
    whole = trainer(str(tmp_path / "policy"), *task)
    initial = cloned(whole.model)
    whole.train()
    assert "resuming" not in capsys.readouterr().out
    resumed = trainer(str(tmp_path / "policy"), *task)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert "resuming from checkpoint-3\n" in capsys.readouterr().out
    assert trajectory(resumed) == trajectory(whole)
    weights = cloned(whole.model)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in cloned(resumed.model).items())
    assert all(not torch.equal(tensor, initial[name]) for name, tensor in whole.model.named_parameters())


class Noted(TrainerCallback):
    """Notes the weights at each save."""

    def __init__(self):
        self.weights = {}

    def on_save(self, args, state, control, model=None, **kwargs):
        self.weights[state.global_step] = cloned(model)


def earlier_is_better(completions, trainer_state, **kwargs):
    digits = [sum(character.isdigit() for character in str(text)) for text in completions]
    return [count / 8 - 10 * trainer_state.global_step for count in digits]


@pytest.mark.parametrize("name", NAMES)
def test_the_best_model_is_that_of_its_checkpoint_with_everything_fp8_off_too(name, tmp_path):
    FAMILIES[name].save(tmp_path / "policy")
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    flags = {"per_device_eval_batch_size": 4, "learning_rate": 1e-2, **saving, **best, **WITHOUT_ENGINE}
    prompts, noted = (vision if FAMILIES[name].images else runs).dataset(8), Noted()
    task = {"reward_funcs": earlier_is_better, "train": prompts, "eval_dataset": prompts.select(range(4))}
    with training(
        str(tmp_path / "policy"), arguments(tmp_path / "run", **flags), callbacks=[noted], **task
    ) as trainer:
        trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1") and trainer.state.global_step == 3
    found = cloned(trainer.model)
    assert all(torch.equal(tensor, noted.weights[1][name]) for name, tensor in found.items())
    assert all(not torch.equal(found[name], noted.weights[3][name]) for name, _ in trainer.model.named_parameters())


@pytest.mark.parametrize("option", [{"load_best_model_at_end": True}, {}], ids=["best", "resumed"])
def test_norms_that_are_trained_beside_adapters_are_named_before_the_first_step(option, checkpoint, tmp_path):
    flags = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    args = arguments(tmp_path, **flags, **option, per_device_eval_batch_size=4, **WITHOUT_ENGINE)
    adapters = LoraConfig(task_type="CAUSAL_LM")
    with training(checkpoint("qwen3"), args, peft_config=adapters, eval_dataset=dataset(4)) as trainer:
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or "norm" in name)
        if not option:
            trainer.train()  # saves, as PEFT does, adapters alone
        trainer.state.global_step = -1
        with pytest.raises(ValueError, match="lacks .*q_norm.weight and 8 more, .*modules_to_save of peft_config"):
            trainer.train(resume_from_checkpoint=None if option else str(tmp_path / "checkpoint-1"))
        assert trainer.state.global_step == -1
