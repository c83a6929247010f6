"""Sleep mode: what is freed when, in which order the engine wakes up, and when weights have to be sent again.

vLLM refuses sleep mode on CPU, where its worker frees nothing. Here engine, scheduler and executor are vLLM's own. The
worker plays with real tensors what CuMem does: level 2 destroys parameters, level 1 keeps a copy of them, and waking
brings back what was kept. Both destroy the KV cache, as does discarding it alone.
"""

import pytest
import torch
from peft import LoraConfig
from vllm import LLM
from vllm.v1.worker.cpu_worker import CPUWorker

from testing import engines
from testing.runs import arguments, column, dataset, reward_digits, rows
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.engine.vllm.rollout_llm import RolloutLLM
from trl_fp8.sync.writer import Writer
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine


@pytest.fixture
def events(monkeypatch):
    """What happened to the engine, in order."""
    happened, kept = [], {}

    def parameters(worker):
        return [parameter for parameter in worker.model_runner.model.parameters() if parameter.numel()]

    def destroy(tensors):
        for tensor in tensors:
            tensor.data.view(torch.uint8).fill_(0x7F)  # NaN in e4m3, 3e38 in BF16

    def discard(worker, tags):
        happened.append(f"free {' '.join(tags)}")
        destroy(layer.kv_cache for layer in attention_layers(worker.model_runner.model).values())

    def sleep(worker, level):
        kept["weights"] = [p.detach().clone() for p in parameters(worker)] if level == 1 else None
        destroy(parameters(worker))
        discard(worker, ["kv_cache"])
        happened[-1] = f"sleep {level}"

    def wake_up(worker, tags):
        happened.append(f"wake {' '.join(tags)}")
        if tags == ["weights"] and kept["weights"] is not None:
            for parameter, weight in zip(parameters(worker), kept["weights"], strict=True):
                parameter.data.copy_(weight)

    def noted(name, original):
        def call(*args, **kwargs):
            happened.append(name)
            return original(*args, **kwargs)

        return call

    make = RolloutLLM.__init__
    monkeypatch.setattr(RolloutLLM, "__init__", lambda llm, enable_sleep_mode, **kw: make(llm, **kw))
    for played in (sleep, discard, wake_up):
        monkeypatch.setattr(CPUWorker, played.__name__, played)
    monkeypatch.setattr(LLM, "generate", noted("generate", LLM.generate))
    monkeypatch.setattr(Writer, "write", noted("write", Writer.write))
    return happened


def sleepy_trainer(checkpoint, folder, **flags):
    args = arguments(folder, vllm_enable_sleep_mode=True, per_device_eval_batch_size=4, **flags)
    return FP8GRPOTrainer(checkpoint, reward_digits, args, dataset(), eval_dataset=dataset(2))


SYNCED = ["wake weights", "write", "wake kv_cache", "generate"]
AS_BEFORE = ["wake weights", "wake kv_cache", "generate"]


def test_weights_are_sent_when_they_changed_and_only_then(events, checkpoint, tmp_path):
    trainer = sleepy_trainer(checkpoint("qwen3"), tmp_path, max_steps=3, eval_strategy="steps", eval_steps=2)
    trainer.train()
    step = [*SYNCED, "sleep 2"]
    evaluation = [*SYNCED, "sleep 1", *AS_BEFORE, "sleep 1"]  # two batches of 4 completions
    assert events == [
        *("sleep 2", "wake weights", "write", *step[1:]),  # first of all the constants of vLLM's own
        *step,
        *evaluation,
        *step,  # an evaluation may have had other weights
        *evaluation,
    ]  # transformers evaluates at the end
    # all that a resumed run has, to draw what this one drew
    assert trainer.vllm_generation.llm.occasion == (trainer.args.seed, 3, 0)
    logged = rows(trainer)
    assert all(0 < row["mismatch/logp_difference_mean"] < 0.3 for row in logged)
    engines.shutdown(trainer.vllm_generation.llm)


def test_weights_that_the_trainer_computes_with_stay_awake(events, checkpoint, tmp_path):
    """Sent once when they changed: for rollouts, and for the second optimizer step on the same rollouts."""
    flags = {
        "fp8_forward": "one_forward",
        "num_iterations": 2,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = sleepy_trainer(checkpoint("qwen3"), tmp_path, **flags)
    trainer.train()
    used = ["wake kv_cache", "generate", "free kv_cache"]
    second_step = ["write"]
    evaluation = ["write", *used, *used]
    assert events == [
        *("sleep 2", "wake weights"),  # nothing was sent yet
        *("write", "write", *used, *second_step, *evaluation),  # first of all the constants of vLLM's own
        *("write", *used, *second_step, *evaluation),  # an evaluation may have had other weights
    ]
    mismatch = [column(trainer, f"{kind}mismatch/logp_difference_mean") for kind in ("", "eval_")]
    assert [len(found) for found in mismatch] == [2, 2] and max(map(max, mismatch)) < 1e-5
    engines.shutdown(trainer.vllm_generation.llm)


def test_a_shared_base_stays_awake(events, checkpoint, tmp_path):
    """It is written when the engine has started, asleep; from then on adapters are, when they changed."""
    flags = {"fp8_base": True, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2}
    args = arguments(tmp_path, vllm_enable_sleep_mode=True, per_device_eval_batch_size=4, **flags)
    adapters = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = FP8GRPOTrainer(
        checkpoint("qwen3"), reward_digits, args, dataset(), eval_dataset=dataset(2), peft_config=adapters
    )
    started = ["sleep 2", "wake weights", "write"]
    assert events == started
    trainer.evaluate()
    trainer.train()
    used = ["wake kv_cache", "generate", "free kv_cache"]
    step = evaluation = ["write", *used]
    assert events == [
        *started,
        *("write", "write", *evaluation, *used),  # constants, and what else nobody trains; two batches
        *(*step, *step, *evaluation, *used),
        *(*step, *evaluation, *used),
    ]
    mismatch = [column(trainer, f"{kind}mismatch/logp_difference_mean") for kind in ("", "eval_")]
    assert [len(found) for found in mismatch] == [3, 2] and max(map(max, mismatch)) < 0.3
    assert trainer.vllm_generation.audit_failures == 0
    engines.shutdown(trainer.vllm_generation.llm)


def test_turns_of_a_conversation_share_one_sync(events, checkpoint, tmp_path):
    def two_turns(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        for _ in range(2):
            prompt_ids, completion_ids, logprobs, _ = trainer.vllm_generation.generate(ids, None, 1)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[token[0] for token in sequence] for sequence in logprobs],
        }

    args = arguments(tmp_path, vllm_enable_sleep_mode=True, max_steps=2)
    trainer = FP8GRPOTrainer(checkpoint("qwen3"), reward_digits, args, dataset(), rollout_func=two_turns)
    trainer.train()
    step = [*SYNCED, "sleep 1", *AS_BEFORE, "sleep 1"]
    assert events == ["sleep 2", "wake weights", "write", *step[1:], *step]
    engines.shutdown(trainer.vllm_generation.llm)


def test_scales_that_a_wake_up_lost_are_named(events, checkpoint, tmp_path, monkeypatch):
    trainer = sleepy_trainer(checkpoint("qwen3"), tmp_path, max_steps=1)
    wake_up = LLM.wake_up

    def forgetful(llm, tags):
        wake_up(llm, tags)
        if tags == ["kv_cache"]:
            attention_layers(engine_model(llm))[1]._k_scale.fill_(1.0)

    monkeypatch.setattr(LLM, "wake_up", forgetful)
    with pytest.raises(RuntimeError, match=r"(?s)did not arrive.*layer 1 k_scale: device tensor holds 1, sent 0\.0"):
        trainer.train()
    engines.shutdown(trainer.vllm_generation.llm)
