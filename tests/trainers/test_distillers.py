"""TRL's trainers that distill: real engines, equality with TRL when everything is off, and what is refused."""

import dataclasses
import json
import math

import pytest
import torch
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from testing.chats import chat_tokenizer
from testing.runs import SHORT, column, dataset, reward_digits, rows, training
from trl_fp8 import (
    FP8DistillationConfig,
    FP8DistillationTrainer,
    FP8SDFTConfig,
    FP8SDFTTrainer,
    FP8SDPOConfig,
    FP8SDPOTrainer,
    rollouts,
)


OFF = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": False}
KINDS = {
    "distillation": (DistillationTrainer, DistillationConfig, FP8DistillationTrainer, FP8DistillationConfig),
    "sdft": (SDFTTrainer, SDFTConfig, FP8SDFTTrainer, FP8SDFTConfig),
    "sdpo": (SDPOTrainer, SDPOConfig, FP8SDPOTrainer, FP8SDPOConfig),
}


def flags_of(config, kind, **flags):
    known = {item.name for item in dataclasses.fields(config)}
    flags = {name: value for name, value in (SHORT | flags).items() if name in known}
    # The tiny vocabulary has less than the 100 tokens that SDFT compares
    return (
        flags
        | {"distillation": {}, "sdft": {"distillation_topk": 16}, "sdpo": {"success_reward_threshold": 0.1}}[kind]
    )


def trained(kind, trainer_class, args, checkpoint, look):
    """Train for a short time and return what `look` sees of the trainer while its engine runs."""
    task = dataset().map(lambda row: {"privileged_context": f"it is {row['prompt'][:2]}"})
    options = {"train": task, "reward_funcs": reward_digits if kind == "sdpo" else None}
    if kind == "distillation":
        options["teacher_model"] = checkpoint("llama")
    if kind == "sdpo":
        options["processing_class"] = chat_tokenizer()
    with training(checkpoint("qwen3"), args, trainer_class, **options) as trainer:
        start = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        assert any(not torch.equal(start[name], p) for name, p in trainer.model.named_parameters())
        return look(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_with_every_fp8_flag_off_it_is_trl_bit_for_bit(kind, checkpoint, tmp_path):
    trls_class, trls_config, trainer_class, config = KINDS[kind]

    def look(trainer):
        return column(trainer, "grad_norm"), {name: p.detach() for name, p in trainer.model.named_parameters()}

    results = []
    for each, its_config, flags in (
        (trls_class, trls_config, {"use_vllm": False}),
        (trainer_class, config, OFF),
    ):
        args = its_config(str(tmp_path / each.__name__), **flags_of(its_config, kind, max_steps=2, **flags))
        results.append(trained(kind, each, args, checkpoint, look))
    (trls_norms, trls_weights), (norms, weights) = results
    assert trls_norms == norms and len(norms) == 2 and any(norms)
    assert all(torch.equal(trls_weights[name], weights[name]) for name in trls_weights)


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_audited(kind, checkpoint, tmp_path):
    _, _, trainer_class, config = KINDS[kind]
    args = config(str(tmp_path), **flags_of(config, kind, vllm_max_model_length=64))

    def look(trainer):
        generation = trainer.vllm_generation
        assert generation.audit_failures == 0
        assert generation.last_sync.fp8_weights == len(trainer.recipe.fp8_modules) > 0
        return rows(trainer)

    logged = trained(kind, trainer_class, args, checkpoint, look)
    assert len(logged) == 3
    for row in logged:
        assert math.isfinite(row["loss"]) and row["fp8/sync_seconds"] > 0 and row["fp8/kv_scale_min"] > 0
    assert len({row["fp8/audited_tensors"] for row in logged}) == 1
    assert not any(name.startswith("mismatch/") for row in logged for name in row)  # as docs/migration.md says
    log = [json.loads(line) for line in (tmp_path / "fp8_run.jsonl").read_text().splitlines()]
    assert sum("kv_scales" in row for row in log) == 3  # each batch went through the features


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [{"fp8_forward": "one_forward"}, {"router_replay": "rollout"}, {"fp8_base": True}])
def test_features_that_follow_a_scoring_pass_are_refused_by_name(kind, flags, tmp_path):
    config = KINDS[kind][3]
    [name] = flags
    with pytest.raises(ValueError, match=f"{name}=.*{config.__name__}.* one that distills has none. Set {name}="):
        config(str(tmp_path), **flags_of(config, kind, **flags))


def test_a_model_stored_in_fp8_is_refused_where_trl_cannot_load_it_in_high_precision(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(rollouts, "dequantizing_config", lambda *_: object())  # as for a checkpoint in FP8
    args = FP8SDFTConfig(str(tmp_path), **flags_of(FP8SDFTConfig, "sdft", **OFF))
    with pytest.raises(ValueError, match="stored in FP8 or MXFP4, and TRL's SDFTTrainer takes no quantization_config"):
        FP8SDFTTrainer(checkpoint("qwen3"), args=args, train_dataset=dataset())
