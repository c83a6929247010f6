"""A run that was interrupted and resumed takes the steps that it would have taken anyway, bit for bit."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from transformers import TrainerCallback

from testing.runs import arguments, training, trajectory
from trl_fp8.run.checkpoints import load_rollouts, sampling_of, save_rollouts
from trl_fp8.scripts.grpo import _stopped


pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "options",
    [
        # checkpoint 2 falls between two generations: 3 updates for each batch of rollouts
        {"fp8_forward": "one_forward", "num_iterations": 3},
        {"num_iterations": 3, "beta": 0.02},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 6, "simulate_kv_cache": True},
        {"fp8_base": True, "fp8_forward": "one_forward", "num_iterations": 3, "beta": 0.02, "learning_rate": 1e-2},
        {"merged": True, "beta": 0.02, "learning_rate": 1e-2},
        {"beta": 0.02, "sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 1},
    ],
    ids=["full", "iterations", "generation-of-three-steps", "adapters", "merged-adapters", "averaged-reference"],
)
def test_a_resumed_run_continues_as_if_it_had_not_been_interrupted(options, checkpoint, tmp_path):
    options = dict(options)
    adapters = LoraConfig(task_type="CAUSAL_LM") if options.pop("merged", options.get("fp8_base")) else None
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=5, **options)
    with training(checkpoint("qwen3"), args, peft_config=adapters) as trainer:
        trainer.train()
        whole, weights = trajectory(trainer), {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with training(checkpoint("qwen3"), args, peft_config=adapters) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trajectory(trainer) == whole
        assert all(torch.equal(p, weights[name]) for name, p in trainer.model.named_parameters())
    assert (
        len({row["grad_norm"] for row in whole}) == 5
    )  # losses of a policy that is its rollouts' are 0, but for rounding


def test_ctrl_c_names_a_checkpoint_of_the_run_and_none_of_an_earlier_one(checkpoint, tmp_path):
    earlier = tmp_path / "checkpoint-9"
    earlier.mkdir()
    (earlier / "trainer_state.json").touch()
    args, resumed_at = arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=2), []

    class Resumed(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            resumed_at.append(_stopped([trainer]))

    with training(checkpoint("qwen3"), args, callbacks=[Resumed()]) as trainer:
        trainer.train()
        last = tmp_path / "checkpoint-2"
        assert _stopped([trainer]).endswith(f"the same command and --resume_from_checkpoint {last}, from {last}")
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        shutil.rmtree(earlier)
        assert _stopped([trainer]).endswith(f"the same command and --resume_from_checkpoint auto, from {last}")
        args.resume_from_checkpoint = "auto"
        assert _stopped([trainer]).endswith(f"at step 2 of 2; go on with the same command, from {last}")
        args.resume_from_checkpoint = str(tmp_path / "checkpoint-0")  # that save_total_limit has deleted since
        assert _stopped([trainer]).endswith(f"the same command and --resume_from_checkpoint auto, from {last}")
    assert "this run has no checkpoint yet" in resumed_at[0]
    assert resumed_at[1].endswith(f", from {tmp_path / 'checkpoint-1'}")


def test_the_file_of_rollouts_is_what_makes_the_difference(checkpoint, tmp_path):
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=4, num_iterations=3)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
        whole = trajectory(trainer)
    own = tmp_path / "checkpoint-2" / "rollouts_0.pt"
    own.rename(own.with_name("rollouts_1.pt"))  # another rank's
    with pytest.raises(ValueError, match="lacks rollouts_0.pt.*Copy the whole checkpoint"):
        load_rollouts(own.parent, Accelerator(cpu=True), sampling_of(args))
    own.with_name("rollouts_1.pt").unlink()
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trajectory(trainer)[:2] == whole[:2] and trajectory(trainer)[2:] != whole[2:]


def test_another_kernel_than_before_is_named(checkpoint, tmp_path, caplog):
    args = arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=2)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
    folder = tmp_path / "checkpoint-1"
    assert json.loads((folder / "engine.json").read_text()) == {"linear_backend": "auto"}
    for written, warned in (({"linear_backend": "auto"}, False), ({"linear_backend": "deep_gemm"}, True)):
        (folder / "engine.json").write_text(json.dumps(written))
        caplog.clear()
        with training(checkpoint("qwen3"), args) as trainer:
            trainer.train(resume_from_checkpoint=str(folder))
        assert ("vllm_engine_kwargs={'linear_backend': 'deep_gemm'} it does" in caplog.text) == warned


@pytest.mark.parametrize("ranks, rank", [(1, 0), (3, 0), (3, 2)])
def test_rollouts_of_another_number_of_ranks_are_refused_on_every_rank(ranks, rank, tmp_path):
    def of(ranks, rank):
        return SimpleNamespace(num_processes=ranks, process_index=rank, device=torch.device("cpu"))

    for index in range(2):
        save_rollouts(tmp_path, of(2, index), 5, [{"prompt_ids": torch.full((2, 3), index)}], {})
    step, (batch,) = load_rollouts(tmp_path, of(2, 1), {})
    assert step == 5 and torch.equal(batch["prompt_ids"], torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=f"generation of 2 processes.*among {ranks}.*without rollouts_"):
        load_rollouts(tmp_path, of(ranks, rank), {})


@pytest.mark.parametrize("flags", [{"top_p": 0.9}, {"temperature": 0.7}, {"generation_kwargs": {"min_p": 0.1}}])
def test_rollouts_are_never_scored_as_if_sampled_otherwise_than_they_were(flags, tmp_path):
    """Either way round: the run has it newly, or no longer."""
    [name] = flags.get("generation_kwargs") or flags
    plain, other = (sampling_of(arguments(tmp_path, **each)) for each in ({}, flags))
    accelerator = Accelerator(cpu=True)
    for before, now in ((plain, other), (other, plain)):
        save_rollouts(tmp_path, accelerator, 1, [], before)
        assert load_rollouts(tmp_path, accelerator, before) == (1, [])
        said = (
            f"was sampled with {name}={before[name]}, and this run has {name}={now[name]}:.*Set {name}={before[name]}"
        )
        with pytest.raises(ValueError, match=said):
            load_rollouts(tmp_path, accelerator, now)
