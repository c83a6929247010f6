"""TRL's trainers that distill: real engines, equality with TRL when everything is off, and what is refused."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from trl.experimental.iw_opd.iw_opd_trainer import _RepeatBatchDataLoader

from testing.other_trainers import KINDS, config_of, options_of
from testing.runs import column, dataset, recorded, rows, training
from trl_fp8 import FP8GOLDTrainer, FP8SDFTTrainer, rollouts
from trl_fp8.recipe.names import NOWHERE
from trl_fp8.trainers.iw_opd_trainer import skip_repeated_batches


OFF = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": False}
DISTILLERS = ["distillation", "sdft", "sdpo", "gold", "iw_opd"]


def trained(kind, trainer_class, args, checkpoint, look):
    """Train for a short time and return what `look` sees of the trainer while its engine runs."""
    options = options_of(kind, checkpoint("llama"))
    with training(checkpoint("qwen3"), args, trainer_class, **options) as trainer:
        start = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        assert any(not torch.equal(start[name], p) for name, p in trainer.model.named_parameters())
        return look(trainer)


@pytest.mark.parametrize("kind", DISTILLERS)
def test_with_every_fp8_flag_off_it_is_trl_bit_for_bit(kind, checkpoint, tmp_path):
    def look(trainer):
        return column(trainer, "grad_norm"), {name: p.detach() for name, p in trainer.model.named_parameters()}

    results = []
    trls_class, _, trainer_class, _ = KINDS[kind]
    for each, trls in ((trls_class, True), (trainer_class, False)):
        args = config_of(kind, tmp_path / each.__name__, trls, max_steps=2, **OFF)
        results.append(trained(kind, each, args, checkpoint, look))
    (trls_norms, trls_weights), (norms, weights) = results
    assert trls_norms == norms and len(norms) == 2 and any(norms)
    assert all(torch.equal(trls_weights[name], weights[name]) for name in trls_weights)


@pytest.mark.parametrize("kind", ["sdft", "sdpo"])
def test_a_teacher_at_several_servers_is_refused(kind, tmp_path):
    flags = {"use_teacher_server": True, "teacher_model_kind": "live", "distillation_mode": "sampled_token"}
    flags |= {"distillation_alpha": 1.0, "vllm_mode": "server", "vllm_server_base_url": "http://a,http://b"}
    with pytest.raises(ValueError, match="='http://a,http://b' with use_teacher_server=True: TRL asks one server"):
        config_of(kind, tmp_path, **flags)


@pytest.mark.engine
@pytest.mark.parametrize("kind", DISTILLERS)
def test_three_steps_are_audited(kind, checkpoint, tmp_path):
    args = config_of(kind, tmp_path, vllm_max_model_length=64)

    def look(trainer):
        generation = trainer.vllm_generation
        assert generation.audit_failures == 0
        assert generation.last_sync.fp8_weights == len(trainer.recipe.fp8_modules) > 0
        return rows(trainer)

    logged = trained(kind, KINDS[kind][2], args, checkpoint, look)
    assert len(logged) == 3
    for row in logged:
        assert math.isfinite(row["loss"]) and row["fp8/sync_seconds"] > 0 and row["fp8/kv_scale_min"] > 0
    assert len({row["fp8/audited_tensors"] for row in logged}) == 1
    assert not any(name.startswith("mismatch/") for row in logged for name in row)  # as docs/migration.md says
    log = [json.loads(line) for line in (tmp_path / "fp8_run.jsonl").read_text().splitlines()]
    assert sum("kv_scales" in row for row in log) == 3  # each batch went through the features


@pytest.mark.engine
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["sdft", "sdpo"])
def test_old_log_probs_and_losses_use_the_experts_of_the_rollouts_and_a_teacher_its_own(
    kind, gradient_checkpointing, checkpoint, tmp_path
):
    flags = {"num_iterations": 2, "max_steps": 2, "router_replay": "rollout", "teacher_model_kind": "live"}
    flags |= {"gradient_checkpointing": gradient_checkpointing, "bf16": False, "vllm_max_model_length": 64}
    args = config_of(kind, tmp_path, **flags)
    model = checkpoint("qwen3_moe", num_experts=8)
    with training(model, args, KINDS[kind][2], **options_of(kind, model)) as trainer:
        assert args.kv_calibration == "rollout" and args.setting_against_full_pass is None
        router, used, fed = trainer.model.model.layers[0].mlp.gate, [], []
        router.register_forward_hook(lambda _, __, output: used.append((torch.is_grad_enabled(), output[-1].clone())))
        recorded(trainer, "compute_loss", lambda _, __, inputs, **___: fed.append(inputs["routed_experts"]))
        trainer.train()
        logged = rows(trainer)
    # One generation: its old log-probs are made with its routes, and both updates use them again
    assert logged[0]["router/disagreement"] == 0 < logged[0]["router/own_disagreement"]
    assert math.isfinite(logged[0]["fp8/kv_saturation_fraction"])
    of_losses = [experts for gradients, experts in used if gradients]
    assert len(fed) == 2 and len(of_losses) == (4 if gradient_checkpointing else 2)
    for number, experts in enumerate(of_losses):
        routes = fed[number * len(fed) // len(of_losses)][:, :, 0]
        known = routes[..., 0] != NOWHERE
        assert known.any() and torch.equal(experts.view(routes.shape)[known], routes[known].long())


@pytest.mark.engine
@pytest.mark.parametrize("weight, mode", [(0.0, "token_truncate"), (0.5, "sequence_mask")])
def test_the_policy_loss_of_sdpo_is_corrected(weight, mode, checkpoint, tmp_path):
    flags = {"distillation_weight": weight, "vllm_importance_sampling_mode": mode, "loss_type": "grpo"}
    args = config_of("sdpo", tmp_path, vllm_max_model_length=64, **flags)
    model = checkpoint("qwen3")
    with training(model, args, KINDS["sdpo"][2], **options_of("sdpo", model)) as trainer:
        losses = recorded(trainer, "_compute_policy_loss", lambda loss, inputs, _: (loss.item(), inputs))
        trainer.train()
        logged = rows(trainer)
    assert len(logged) == len(losses) == 3
    for row in logged:
        # As for GRPO (tests/trainer/test_trainer.py): log-probs of a stale engine are off by whole nats
        assert 0 < row["mismatch/logp_difference_mean"] < 0.3 and row["mismatch/fraction_missing"] == 0
    for loss, inputs in losses:
        # The policy has not moved since it was scored, so TRL's own ratio is 1
        mask = inputs["completion_mask"]
        difference = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * mask
        ratio = difference.exp() if mode == "token_truncate" else difference.sum(1, keepdim=True).exp()
        weights = ratio.clamp(max=2.0) if mode == "token_truncate" else torch.where(ratio > 2.0, 0.0, ratio)
        advantages = inputs["advantages"][:, None]
        expected = -((weights * advantages * mask).sum(1) / mask.sum(1)).mean().item()
        uncorrected = -((advantages * mask).sum(1) / mask.sum(1)).mean().item()
        assert loss == pytest.approx(expected, abs=1e-5)
        assert abs(expected - uncorrected) > 1e-4


def test_a_correction_of_sdpo_is_on_where_there_is_a_policy_loss(tmp_path):
    def config(**flags):
        return config_of("sdpo", tmp_path, **flags)

    assert config().correction is None and config().setting_against_full_pass == "num_iterations=1"
    mixed = config(distillation_weight=0.5)
    assert mixed.correction.level == "token" and mixed.setting_against_full_pass is None
    assert config(distillation_weight=0.5, **OFF).correction is None
    measured = config(rollout_correction="monitor")
    assert measured.correction.monitor_only and measured.setting_against_full_pass is None
    with pytest.raises(ValueError, match="top_p=0.9 with FP8SDPOConfig and .* over all tokens. Set top_p=1.0"):
        config(distillation_weight=0.5, top_p=0.9)
    assert config(top_p=0.9).correction is None


@pytest.mark.parametrize("kind", DISTILLERS)
@pytest.mark.parametrize("flags", [{"fp8_forward": "one_forward"}, {"router_replay": "rollout"}, {"fp8_base": True}])
def test_features_that_no_distilling_loss_follows_are_refused_by_name(kind, flags, tmp_path):
    [name] = flags
    if name == "router_replay" and kind in ("sdft", "sdpo"):
        flags = {"router_replay": "monitor"}  # which needs log-probs of the rollouts
    with pytest.raises(ValueError, match=f"{name}=.*(with {KINDS[kind][3].__name__}|num_iterations=1).*et {name}="):
        config_of(kind, tmp_path, **flags)


def test_routes_of_a_teachers_prompts_are_refused(tmp_path):
    flags = {"generate_from_teacher": True, "num_iterations": 2, "router_replay": "rollout"}
    with pytest.raises(ValueError, match="router_replay='rollout' with generate_from_teacher=True: .*Set router"):
        config_of("sdft", tmp_path, **flags)


def test_a_model_stored_in_fp8_is_refused_where_trl_cannot_load_it_in_high_precision(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(rollouts, "dequantizing_config", lambda *_: object())  # as for a checkpoint in FP8
    args = config_of("sdft", tmp_path, **OFF)
    with pytest.raises(ValueError, match="stored in FP8 or MXFP4, and TRL's SDFTTrainer takes no quantization_config"):
        FP8SDFTTrainer(checkpoint("qwen3"), args=args, train_dataset=dataset())


def test_a_generation_without_a_sync_is_refused(tmp_path):  # by TRL for IW-OPD's own objective
    with pytest.raises(ValueError, match="vllm_sync_frequency=2 with FP8GOLDConfig: .*Set vllm_sync_frequency=1"):
        config_of("gold", tmp_path, vllm_sync_frequency=2)
    assert config_of("gold", tmp_path, vllm_sync_frequency=2, **OFF).vllm_sync_frequency == 2


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_refused_where_trl_makes_their_tokens_only_for_the_loss(column):
    trainer = object.__new__(FP8GOLDTrainer)
    trainer.args = SimpleNamespace(own_engine=True)
    trainer.train_dataset = Dataset.from_list([{"messages": [], column: None}])
    message = f"train_dataset has a column '{column}', and FP8GOLDTrainer takes no images with FP8 rollouts"
    with pytest.raises(ValueError, match=message):
        trainer._make_own_generation()


def test_skipping_batches_keeps_their_repetition():
    loader = _RepeatBatchDataLoader(DataLoader(list(range(6)), batch_size=2), repeat_count=2)
    rest = skip_repeated_batches(loader, 2)
    assert [batch.tolist() for batch in rest] == [[2, 3], [2, 3], [4, 5], [4, 5]] and len(rest) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_knows_whether_its_policy_has_trls_fused_head(kind, checkpoint, tmp_path, monkeypatch):
    """Without the head a calibration of KV scales must ask for one row of logits, else it gets those of all tokens."""
    trainer_class = KINDS[kind][2]
    fused = []
    for module in {sys.modules[base.__module__] for base in trainer_class.__mro__}:
        if hasattr(module, "add_fused_lm_head"):
            monkeypatch.setattr(module, "add_fused_lm_head", lambda model, **_: fused.append(model))
    options = options_of(kind, checkpoint("llama"))
    options["train_dataset"] = options.pop("train")
    options = {name: value for name, value in options.items() if value is not None}
    trainer_class(model=checkpoint("qwen3"), args=config_of(kind, tmp_path, **OFF), **options)
    assert trainer_class.has_fused_head == bool(fused)
