"""The mismatch of rollouts, split: a healthy run has no unexplained part, and each planted fault is one."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig
from trl import GRPOTrainer
from trl.experimental.sdpo import SDPOTrainer

from testing.planted_faults import ADAPTERS, FAULTS, LONG, SCORING_FAULTS, adapters_unsent, restart_of, same_prompts
from testing.runs import arguments, rows, training, trajectory
from trl_fp8.features.one_forward.explanation import Explanation, obstacle
from trl_fp8.features.one_forward.unexplained import (
    EXPLAINED,
    LARGE_EXPLAINED_K3,
    MAX_UNEXPLAINED_K3,
    SCORING,
    UNEXPLAINED,
    explained_note,
    mismatch_warnings,
)


PARTS = SCORING, EXPLAINED, UNEXPLAINED


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    args = arguments(tmp_path_factory.mktemp("explained"), **LONG)
    with training(checkpoint("qwen3", max_position_embeddings=384), args, train=same_prompts()) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def restart(trainer):
    return restart_of(trainer)


def run(trainer, fault, caplog):
    """Train with a fault. Return the logged rows, and warnings about unexplained mismatch."""
    caplog.clear()
    with caplog.at_level(logging.WARNING), fault:
        trainer.train()
    return rows(trainer), [record.message for record in caplog.records if "FP8 is not the cause" in record.message]


@pytest.mark.engine
def test_a_healthy_run_has_no_unexplained_part_and_no_warning(trainer, restart, caplog):
    passes = trainer.feature(Explanation).passes
    found, warnings = run(trainer, nullcontext(), caplog)
    assert len(found) == trainer.feature(Explanation).passes - passes == 2
    for row in found:
        assert row[UNEXPLAINED] == 0 and row[EXPLAINED] == pytest.approx(row["mismatch/k3_kl"], rel=1e-6)
        assert row[EXPLAINED] > 1e-5 and row[SCORING] == 0
    assert warnings == [] and not [type(m) for m in trainer.model.modules() if type(m).__name__.startswith("Followed")]


@pytest.mark.engine
def test_the_first_rollouts_of_each_call_of_train_are_explained(trainer, restart, monkeypatch):
    monkeypatch.setattr(trainer.args, "explain_mismatch_steps", 50)
    explanation = trainer.feature(Explanation)
    for _ in range(2):
        passes = explanation.passes
        trainer.train()
        assert explanation.passes == passes + 1


@pytest.mark.engine
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_unexplained(name, trainer, restart, caplog):
    restart()
    found, warnings = run(trainer, FAULTS[name](trainer), caplog)
    assert max(row[UNEXPLAINED] for row in found) > MAX_UNEXPLAINED_K3
    assert len(warnings) == 1 and UNEXPLAINED in warnings[0]  # once a run
    assert max(row[SCORING] for row in found) == 0


@pytest.mark.engine
@pytest.mark.parametrize("name", SCORING_FAULTS)
def test_a_fault_of_the_trainers_scoring_is_not_taken_for_fp8(name, trainer, restart, caplog):
    restart()
    found, warnings = run(trainer, SCORING_FAULTS[name](trainer), caplog)
    assert max(row[SCORING] for row in found) > MAX_UNEXPLAINED_K3
    assert max(row[UNEXPLAINED] for row in found) == 0
    assert len(warnings) == 1 and SCORING in warnings[0] and "disable_dropout=True" in warnings[0]


@pytest.mark.engine
def test_adapters_that_a_sync_does_not_send_are_named(checkpoint, tmp_path, caplog):
    """The engine holds what it was sent, so that its kernels repeat the fault: the policy's own modules show it."""
    args = arguments(tmp_path, max_steps=1, explain_mismatch_steps=1)
    with adapters_unsent(), training(checkpoint("qwen3"), args, peft_config=ADAPTERS) as trainer:
        found, [warning] = run(trainer, nullcontext(), caplog)
    assert found[0][UNEXPLAINED] == pytest.approx(found[0]["mismatch/k3_kl"], rel=1e-6) and found[0][EXPLAINED] == 0
    assert "model.layers.0.self_attn.v_proj: output (error" in warning


@pytest.mark.engine
def test_an_explanation_changes_no_number_of_a_run(checkpoint, tmp_path):
    """With LoRA's dropout, which draws from the generators that an explanation must leave as they are."""
    lora = LoraConfig(r=4, target_modules=["v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    paths, passes = [], []
    for steps in (0, 2):
        args = arguments(tmp_path / str(steps), max_steps=4, explain_mismatch_steps=steps)
        with training(checkpoint("qwen3"), args, peft_config=lora) as trainer:
            trainer.train()
            explanation = trainer.feature(Explanation)
            passes.append(explanation.passes if explanation else 0)
            paths.append(
                [
                    {n: v for n, v in row.items() if n not in (SCORING, EXPLAINED, UNEXPLAINED)}
                    for row in trajectory(trainer)
                ]
                + [[p.detach().tolist() for n, p in trainer.model.named_parameters() if "lora" in n]]
            )
    assert passes == [0, 2]  # steps 0 and 2 of four
    assert paths[0] == paths[1]


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "phi3", "qwen3_moe"])
def test_other_families_are_explained_exactly(architecture, checkpoint, tmp_path, caplog):
    """Soft caps, sinks, fused projections and experts, once without an FP8 KV cache, once with replayed experts."""
    flags = {"phi3": {"kv_cache_dtype": "auto"}, "qwen3_moe": {"router_replay": "rollout"}}.get(architecture, {})
    args = arguments(tmp_path, max_steps=1, explain_mismatch_steps=1, **flags)
    with training(checkpoint(architecture), args) as trainer:
        [row], warnings = run(trainer, nullcontext(), caplog)
    assert row[UNEXPLAINED] == 0 < row[EXPLAINED] and warnings == []
    assert row.get(SCORING) == (None if "router_replay" in flags else 0)


@pytest.mark.engine
def test_a_policy_that_follows_anyway_needs_no_pass(checkpoint, tmp_path):
    args = arguments(tmp_path, max_steps=1, fp8_forward="one_forward", explain_mismatch_steps=1)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
        assert trainer.feature(Explanation).passes == 0
        [row] = rows(trainer)
        assert row[EXPLAINED] == 0 == row[UNEXPLAINED] and SCORING not in row


@pytest.mark.engine
def test_where_the_policy_cannot_follow_one_sentence_says_why(checkpoint, tmp_path, capfd, caplog):
    args = arguments(tmp_path, max_steps=1, top_p=0.9, explain_mismatch_steps=1)
    with training(checkpoint("qwen3"), args) as trainer:
        found, warnings = run(trainer, nullcontext(), caplog)
    assert capfd.readouterr().out.count("unexplained part: top_p leaves tokens out of the sampling.") == 1
    assert UNEXPLAINED not in found[0] and warnings == []


FOLLOWED = {
    "fp8_weights": True,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
    "vllm_enable_sleep_mode": False,
    "base_in_engine": False,
    "truncated_by": {},
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "fp16": False,
    "vllm_engine_kwargs": {"max_num_seqs": 8},
}


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({}, None),
        ({"device": "cuda"}, "on a GPU kernels are shared only by fp8_forward='one_forward'"),
        ({"kernels": None, "vllm_mode": "server"}, "cannot call kernels of this engine (vllm_mode='server')"),
        ({"fp8_weights": False}, "fp8_weights=False"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size is above 1"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True"),
        ({"distributed": DistributedType.FSDP}, "the policy is sharded"),
        ({"base_in_engine": True}, "fp8_base=True"),
        ({"truncated_by": {"top_k": 20}}, "top_k leaves tokens out"),
        ({"torch_compile": True}, "torch_compile=True replaces the policy's forward"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True replaces the policy's forward"),
        ({"fp16": True}, "fp16=True"),
        ({"vllm_engine_kwargs": {"kernel_config": {}}}, "vllm_engine_kwargs has ['kernel_config']"),
        ({"scope": "tensor"}, "one scale per batch"),
        ({"trl_class": SDPOTrainer}, "TRL's SDPOTrainer scores rollouts by logits of the policy's own output head"),
    ],
    ids=lambda value: next(iter(value), "nothing") if isinstance(value, dict) else "",
)
def test_each_reason_against_a_split_is_named(changed, reason):
    accelerator = SimpleNamespace(
        device=torch.device(changed.get("device", "cpu")), distributed_type=changed.get("distributed", "NO")
    )
    trainer = SimpleNamespace(
        args=SimpleNamespace(**(FOLLOWED | changed)),
        accelerator=accelerator,
        trl_class=lambda: changed.get("trl_class", GRPOTrainer),
    )
    numerics = SimpleNamespace(linears=SimpleNamespace(scope=changed.get("scope", "group")))
    found = obstacle(trainer, numerics, changed.get("kernels", object()))
    assert found is None if reason is None else reason in found


def test_thresholds():
    assert mismatch_warnings({}) == {} == mismatch_warnings({UNEXPLAINED: MAX_UNEXPLAINED_K3, "mismatch/k3_kl": 0.043})
    assert mismatch_warnings({UNEXPLAINED: float("nan")}) == {}
    [text] = mismatch_warnings({UNEXPLAINED: 1.1e-6}).values()
    assert text.startswith("mismatch/unexplained_k3 = 1.1e-06 > 1e-06: unexplained mismatch.")
    assert explained_note({EXPLAINED: LARGE_EXPLAINED_K3}) == "" == explained_note({})
    note = explained_note({EXPLAINED: 0.043})
    assert all(lever in note for lever in ("fp8_ignored_modules", "kv_cache_dtype='auto'", "one_forward"))
    assert "Dropout" in note and "Dropout" not in explained_note({EXPLAINED: 0.043, SCORING: 0.0})
    assert [*mismatch_warnings({SCORING: 2e-6})] == [SCORING]


def test_a_negative_number_of_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="explain_mismatch_steps=-1 is no number of steps"):
        arguments(tmp_path, explain_mismatch_steps=-1)
