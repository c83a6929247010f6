"""After the first rollouts under one forward: that it holds, or the first layer whose output differs, by its name."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig
from vllm import LLM

from testing.runs import arguments, training
from trl_fp8.features.one_forward.engine_kernels import VLLMKernels
from trl_fp8.features.one_forward.following import Following, worst_rollout
from trl_fp8.run.batch import Batch, log_ratio
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

FULL = {"fp8_forward": "one_forward", "max_steps": 1}
LAYERS = 14  # linear layers of two decoder layers
DECODED = 8  # rows of a decode: one for each rollout


def off(module, where=lambda rows: True):
    """From now on what an engine's module returns is off by a hundredth, `where` it gets as many rows."""

    def change(module, args, output):
        first, *rest = output if isinstance(output, tuple) else (output,)
        changed = first * (1.01 if where(len(args[0])) else 1)
        return (changed, *rest) if isinstance(output, tuple) else changed

    return module.register_forward_hook(change)


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    with training(checkpoint("qwen3"), arguments(tmp_path_factory.mktemp("check"), **FULL)) as trainer:
        yield trainer


def failure(trainer, name, **where):
    """Return the error of a run whose engine computes something else in one of its modules."""
    handle = off(engine_model(trainer.vllm_generation.llm).get_submodule(name), **where)
    trainer.feature(Following)._is_checked = False
    try:
        with pytest.raises(
            RuntimeError, match="mean absolute difference of log-probs of the rollouts is 0.0"
        ) as raised:
            trainer.train()
    finally:
        handle.remove()
    return str(raised.value)


@pytest.mark.parametrize(
    "broken, found",
    [
        ("model.layers.1.mlp.down_proj", "the output of model.layers.1.mlp.down_proj, from token 1 of"),
        ("model.layers.0.self_attn.qkv_proj", "the output of model.layers.0.self_attn.q_proj, from token 1 of"),
        ("model.layers.1.self_attn.attn", "the input of model.layers.1.self_attn.o_proj, from token 1 of"),
        ("model.embed_tokens", "the input of model.layers.0.self_attn.q_proj"),
    ],
    ids=lambda text: text.rpartition(".")[2][:20],
)
def test_the_first_layer_that_differs_is_named(broken, found, trainer):
    message = failure(trainer, broken)
    assert found in message and "the difference is at most 1e-05 for a policy of type 'qwen3'" in message
    assert "Set fp8_forward='off'" in message


def test_a_difference_in_decode_steps_alone_is_named_as_such(trainer):
    message = failure(trainer, "model.layers.0.mlp.gate_up_proj", where=lambda rows: rows <= DECODED)
    assert f"all {LAYERS} linear layers agree" in message and "how the engine decodes" in message


def test_an_engine_whose_modules_are_not_called_is_said_to_be_compiled(trainer, monkeypatch):
    monkeypatch.setattr(VLLMKernels, "watching", lambda kernels, note: nullcontext())
    assert "vllm_engine_kwargs={'enforce_eager': True} this message names" in failure(
        trainer, "model.layers.1.mlp.down_proj"
    )


def test_log_probs_that_are_no_numbers_are_no_agreement(trainer, monkeypatch):
    """Every other token is equal on both sides."""
    following, batch, logps = trainer.feature(Following), Batch({}), torch.full((2, 4), -1.0)
    batch.ratio = log_ratio(logps.where(torch.tensor([True, False] * 2), torch.nan), logps, torch.ones(2, 4))
    monkeypatch.setattr(following, "_is_checked", False)
    monkeypatch.setattr(following, "_first_difference", lambda batch: "Nobody knows.")
    text = "fp8_forward='one_forward', but 4 of the trainer's log-probs of the rollouts are no numbers"
    with pytest.raises(RuntimeError, match=text):
        following.extend_batch(batch)


def test_the_rollout_with_a_log_prob_that_is_no_number_is_compared_first():
    rollout, trainer = torch.full((3, 2), -1.0), torch.tensor([[-1.0, -3.0], [-1.0, torch.nan], [-1.0, -1.0]])
    tensors = {"prompt_ids": torch.tensor([[5], [6], [7]]), "completion_ids": torch.tensor([[8, 9]] * 3)}
    tensors |= {f"{part}_mask": torch.ones_like(tensors[f"{part}_ids"]) for part in ("prompt", "completion")}
    batch = Batch(tensors)
    batch.ratio = log_ratio(trainer, rollout, torch.ones(3, 2))
    assert worst_rollout(batch) == [6, 8]


def test_a_warning_is_enough_where_it_is_asked_for(checkpoint, tmp_path, caplog):
    args = arguments(tmp_path, **(FULL | {"fp8_forward_check": "warn", "max_steps": 2}))
    with training(checkpoint("qwen3"), args) as trainer, caplog.at_level("WARNING", logger="trl_fp8"):
        off(engine_model(trainer.vllm_generation.llm).model.layers[0].self_attn.o_proj)
        trainer.train()
    warnings = [record.message for record in caplog.records if "fp8_forward='one_forward', but" in record.message]
    assert len(warnings) == 1 and "the output of model.layers.0.self_attn.o_proj" in warnings[0]


def test_the_check_repeats_when_adapters_are_no_longer_zero(checkpoint, tmp_path, monkeypatch):
    """An engine whose code leaves adapters out, as one compiled without them would, differs from then on."""
    generate, generating = LLM.generate, []

    def alone(llm, *args, **kwargs):
        generating.append(True)
        try:
            return generate(llm, *args, **kwargs)
        finally:
            generating.clear()

    monkeypatch.setattr(LLM, "generate", alone)
    lora = LoraConfig(r=4, target_modules=["v_proj"], task_type="CAUSAL_LM")
    args = arguments(tmp_path, **(FULL | {"fp8_base": True, "learning_rate": 1e-2, "max_steps": 3}))
    with training(checkpoint("qwen3"), args, peft_config=lora) as trainer:
        for name, module in engine_model(trainer.vllm_generation.llm).named_modules():
            if name.endswith(".lora_b"):
                module.register_forward_hook(lambda module, args, y: torch.zeros_like(y) if generating else None)
        with pytest.raises(RuntimeError, match="mean absolute difference of log-probs of the rollouts is 0.0"):
            trainer.train()
        assert trainer.state.global_step == 1  # the first comparison, of adapters that add nothing, was passed


def test_a_run_that_compares_nothing_is_told_so_once(checkpoint, tmp_path, caplog):
    args = arguments(tmp_path, **(FULL | {"vllm_importance_sampling_correction": False, "max_steps": 2}))
    with training(checkpoint("qwen3"), args) as trainer, caplog.at_level("WARNING", logger="trl_fp8"):
        trainer.train()
    warnings = [record.message for record in caplog.records if "share a forward" in record.message]
    assert len(warnings) == 1 and "vllm_importance_sampling_correction=False" in warnings[0]
