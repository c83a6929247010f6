"""An engine that fails: the step fails with it, nothing stale is trained on, and the run can go on."""

import math

import pytest
import torch

from testing.runs import arguments, rows, training
from trl_fp8.features.run_log.log_file import read_run


pytestmark = pytest.mark.engine


def weights_of(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_an_engine_that_raises_ends_the_step_and_the_next_run_of_the_trainer_is_whole(
    checkpoint, tmp_path, monkeypatch
):
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=3)) as trainer:
        llm, calls, after_first = trainer.vllm_generation.llm, [], {}
        generate = llm.generate

        def failing(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                after_first.update(weights_of(trainer))
                raise RuntimeError("the engine's loop died")
            return generate(*args, **kwargs)

        with monkeypatch.context() as broken:
            broken.setattr(llm, "generate", failing)
            with pytest.raises(RuntimeError, match="loop died"):
                trainer.train()
        assert trainer.state.global_step == 1
        assert all(torch.equal(parameter, after_first[name]) for name, parameter in trainer.model.named_parameters())
        assert [row["step"] for row in read_run(tmp_path).rollouts] == [0]
        trainer.train()
        assert trainer.state.global_step == 3 and trainer.vllm_generation.audit_failures == 0


def with_log_probs(trainer, change):
    """Let `change` have the engine's log-probs (a list of lists a completion) before the trainer sees them."""
    generate = trainer.vllm_generation.generate

    def changed(*args, **kwargs):
        prompts, completions, log_probs, *rest = generate(*args, **kwargs)
        return prompts, completions, change(log_probs), *rest

    trainer.vllm_generation.generate = changed


def everywhere(value, rows):
    return [[[value for _ in token] if isinstance(token, list) else value for token in row] for row in rows]


def test_an_engine_that_computes_nan_ends_the_run(checkpoint, tmp_path):
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=2)) as trainer:
        before = weights_of(trainer)
        with_log_probs(trainer, lambda rows: everywhere(math.nan, rows))
        with pytest.raises(RuntimeError, match="log-probs from the engine are NaN.*kv_cache_dtype='auto'"):
            trainer.train()
        assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())


def test_single_missing_log_probs_are_counted_and_not_trained_into_nan(checkpoint, tmp_path):
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=1)) as trainer:
        with_log_probs(trainer, lambda rows: [*everywhere(math.nan, rows[:1]), *rows[1:]])
        trainer.train()
        row = trainer.state.log_history[0]
        assert 0 < row["mismatch/fraction_missing"] < 0.5 and math.isfinite(row["loss"])
        assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_a_kv_cache_that_is_too_small_for_the_batch_only_takes_longer(checkpoint, tmp_path):
    """32 sequences of up to 40 tokens in 10 blocks of 32: most of them wait, some are preempted."""
    kwargs = {"block_size": 32, "num_gpu_blocks_override": 10}
    args = arguments(
        tmp_path, max_steps=1, per_device_train_batch_size=32, max_completion_length=32, vllm_engine_kwargs=kwargs
    )
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
        (row,) = rows(trainer)
        assert row["mismatch/fraction_missing"] == 0 and row["mismatch/logp_difference_mean"] < 0.3
