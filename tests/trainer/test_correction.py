"""Rollout correction inside the real trainer: every preset, every loss, and what must not change."""

import copy
import logging
import math

import pytest
import torch
from transformers import TrainerCallback

from testing.runs import arguments, rows, training
from trl_fp8 import FP8GRPOConfig, RolloutCorrection
from trl_fp8.correction import apply, health, importance, log_ratio, mismatch
from trl_fp8.correction.apply import apply_correction, batch_log_ratio
from trl_fp8.correction.metric import values_of
from trl_fp8.correction.presets import PRESETS, correction_from
from trl_fp8.correction.rejection import Rejection
from trl_fp8.correction.sample import BINS
from trl_fp8.run.file import read_run


LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "vespo"]
BAND = '{"reject": ["geometric_ratio:0.98:1.02:measured", "token_veto:1e-4:"], "denominator": "%s"}'


@pytest.mark.engine
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_trains_with_rejection_under_both_denominators(loss_type, checkpoint, tmp_path):
    args = arguments(tmp_path, loss_type=loss_type, rollout_correction=BAND % "keep", beta=0.01, max_steps=4)

    class Switch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.correction = correction_from(
                    {"reject": ["geometric_ratio:0.98:1.02:measured"], "denominator": "shrink"}
                )

    with training(checkpoint("qwen3"), args, callbacks=[Switch()]) as trainer:
        trainer.train()
        assert len(rows(trainer)) == 4
        for row in rows(trainer):
            assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
            assert "sampling/importance_sampling_ratio/mean" not in row  # TRL's ratio is not what was used
            assert row["mismatch/k3_kl"] > 0 and row["correction/effective_sample_size"] > 0.9
        masked = [row["correction/fraction_masked_sequences"] for row in rows(trainer)]
        assert 0 < sum(masked) < len(masked)  # some sequences rejected, some trained on


@pytest.mark.engine
def test_every_preset_trains(checkpoint, tmp_path):
    """One step after another, so that each also starts from what the one before it made of the policy. Two of those
    that change more than weights: the second starts from what the preset itself has made of it.
    """
    corrections = {name: preset.correction for name, preset in PRESETS.items()}
    twice = {name for name, one in corrections.items() if one.reject or one.bypass or one.needs_all_reduce}
    assert {"fp8_geometric_token_tis", "slime_mis", "verl_bypass_geometric"} <= twice
    names = [name for name in PRESETS for _ in range(2 if name in twice else 1)]

    class Next(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.correction = corrections[names[state.global_step]]

    args = arguments(tmp_path, rollout_correction="monitor", max_steps=len(names))
    with training(checkpoint("qwen3"), args, callbacks=[Next()]) as trainer:
        trainer.train()
        found = rows(trainer)
        for name, row in zip(names, found, strict=True):
            assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]), name
            rules = {rule.statistic for rule in corrections[name].reject}
            logged = {key.rpartition("/")[2] for key in row if key.startswith("correction/fraction_rejected/")}
            assert logged == rules


@pytest.mark.engine
def test_a_preset_that_trl_could_express_is_what_the_loss_gets(checkpoint, tmp_path):
    """TRL computes its own mode beside it (token_truncate at 2), which must not win."""
    batches = []
    narrow = '{"bound": "mask", "bound_min": 0.95, "bound_max": 1.05}'
    with training(checkpoint("qwen3"), arguments(tmp_path, rollout_correction=narrow, max_steps=1)) as trainer:
        assert trainer.correction.trl_mode == "token_mask"
        original = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: batches.append(original(inputs)) or batches[0]
        trainer.train()
        assert "sampling/importance_sampling_ratio/mean" not in rows(trainer)[0]
    batch = batches[0]
    raw = torch.exp((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["completion_mask"])
    outside = (raw < 0.95) | (raw > 1.05)
    assert outside.any() and torch.equal(batch["importance_sampling_ratio"], raw.masked_fill(outside, 0))


@pytest.mark.engine
def test_thresholds_are_warned_about_once(checkpoint, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(health, "MAX_K3_KL", 1e-4)
    with caplog.at_level(logging.WARNING), training(checkpoint("qwen3"), arguments(tmp_path)) as trainer:
        trainer.train()
        values = [row["mismatch/k3_kl"] for row in rows(trainer)]
    assert len(values) > 1 and min(values) > health.MAX_K3_KL
    assert sum("mismatch/k3_kl = " in record.message for record in caplog.records) == 1


@pytest.mark.engine
def test_log_ratios_are_computed_once_a_generation(checkpoint, tmp_path, monkeypatch):
    """For weights, rejection, metrics and the run's file."""
    calls = []
    for module in (apply, importance, mismatch):
        monkeypatch.setattr(module, "log_ratio", lambda *batch: calls.append(1) or log_ratio.log_ratio(*batch))
    args = arguments(tmp_path, rollout_correction="fp8_geometric_token_tis", max_steps=2)
    with training(checkpoint("qwen3"), args) as trainer:
        trainer.train()
    assert [len(row["log_ratio_counts"]) for row in read_run(tmp_path).rollouts] == [BINS + 2] * len(calls)
    assert len(calls) == 2


@pytest.fixture(scope="module")
def scored(checkpoint, tmp_path_factory):
    """A trainer after one step, and the batch of that step as TRL scored it.
    No other engine may start while it lives.
    """
    batches = []
    args = arguments(tmp_path_factory.mktemp("scored"), max_steps=1, rollout_correction="monitor")
    with training(checkpoint("qwen3"), args) as trainer:
        original = type(trainer)._generate_and_score_completions

        def keep(inputs):
            batches.append(original(trainer, inputs))
            return dict(batches[0])

        trainer._generate_and_score_completions = keep
        trainer.train()
        yield trainer, batches[0]


def loss_of(trainer, batch):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def corrected(trainer, batch, correction):
    batch = dict(batch)
    metrics = apply_correction(batch, batch_log_ratio(batch), correction, trainer.accelerator)
    return batch, values_of(metrics)


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name, p in PRESETS.items() if not p.correction.bypass])
def test_equal_log_probs_give_trls_uncorrected_loss_bit_for_bit(name, scored):
    trainer, batch = scored
    equal = dict(batch, sampling_per_token_logps=batch["old_per_token_logps"].clone())
    equal.pop("importance_sampling_ratio")
    ours, metrics = corrected(trainer, equal, PRESETS[name].correction)
    assert torch.equal(ours["importance_sampling_ratio"], torch.ones_like(ours["importance_sampling_ratio"]))
    assert metrics["mismatch/logp_difference_max"] == 0 and metrics["correction/fraction_masked_tokens"] == 0
    with_correction = loss_of(trainer, ours)
    trainer.vllm_importance_sampling_correction = False
    without = loss_of(trainer, equal)
    trainer.vllm_importance_sampling_correction = True
    assert torch.equal(with_correction[0], without[0])
    assert all(torch.equal(with_correction[1][key], without[1][key]) for key in without[1])


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_trls_modes_are_left_to_trl(mode, scored):
    trainer, batch = scored
    correction = RolloutCorrection.from_trl_mode(mode, None, 2.0)
    ours, metrics = corrected(trainer, batch, correction, ratio_from_trl=True)
    assert ours["importance_sampling_ratio"] is batch["importance_sampling_ratio"]
    assert ours["num_items_in_batch"] is batch["num_items_in_batch"] and "tool_mask" not in ours
    assert metrics["correction/ratio_max"] > 0


@pytest.mark.engine
@pytest.mark.parametrize("denominator", ["keep", "shrink"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_an_all_rejected_batch_trains_on_nothing_and_is_reported(denominator, loss_type, scored):
    trainer, batch = scored
    trainer = copy.copy(trainer)
    trainer.loss_type = loss_type
    rule = Rejection("geometric_ratio", 0.999999, 1.000001)
    ours, metrics = corrected(trainer, batch, RolloutCorrection(reject=(rule,), denominator=denominator))
    assert metrics["correction/all_rejected"] == 1 and metrics["correction/fraction_masked_sequences"] == 1
    loss, gradients = loss_of(trainer, ours)
    # VESPO floors a weight of 0 at 1e-8 and multiplies over the tokens: not zero, but nothing
    most = 1e-8 if loss_type == "vespo" else 0.0
    assert abs(loss) <= most and all(gradient.abs().max() <= most for gradient in gradients.values())


@pytest.mark.engine
def test_shrink_changes_loss_mask_and_token_count_but_not_attention(scored):
    trainer, batch = scored
    rule = Rejection("geometric_ratio", 0.98, 1.02, centre="measured")
    keep, _ = corrected(trainer, batch, RolloutCorrection(reject=(rule,)))
    shrink, metrics = corrected(trainer, batch, RolloutCorrection(reject=(rule,), denominator="shrink"))
    assert torch.equal(shrink["completion_mask"], batch["completion_mask"])
    assert shrink["num_items_in_batch"] == shrink["tool_mask"].sum() < keep["num_items_in_batch"]
    dropped = 1 - shrink["tool_mask"].sum() / batch["completion_mask"].sum()
    assert metrics["correction/fraction_masked_tokens"] == pytest.approx(dropped.item(), abs=1e-6)
    assert (keep["importance_sampling_ratio"] == 0).sum() == (batch["completion_mask"] - shrink["tool_mask"]).sum()


@pytest.mark.engine
def test_bypass_makes_the_rollout_the_old_policy(scored):
    trainer, batch = scored
    ours, _ = corrected(trainer, batch, PRESETS["verl_bypass_geometric"].correction)
    real = batch["completion_mask"].bool()
    assert torch.equal(ours["old_per_token_logps"][real], batch["sampling_per_token_logps"][real])
    assert not torch.equal(ours["old_per_token_logps"][real], batch["old_per_token_logps"][real])


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"rollout_correction": "verl"}, ["rollout_correction='verl'", "not a preset", "nemo_icepop"]),
        ({"rollout_correction": '{"levels": 1}'}, ["['levels']", "batch_normalize"]),
        ({"rollout_correction": '{"bound_max": 0.5}'}, ["bound_max=0.5", "at least 1"]),
        ({"rollout_correction": '{"reject": ["geometric_ratio"]}'}, ["'geometric_ratio' is not a rejection rule"]),
        *(
            (
                {"rollout_correction": "nemo_icepop", f"vllm_importance_sampling_{name}": value},
                [f"rollout_correction='nemo_icepop' and vllm_importance_sampling_{name}={value!r} both", "Remove one"],
            )
            for name, value in {"mode": "token_mask", "clip_max": 7.0, "clip_min": 0.5, "cap": 2.5}.items()
        ),
        (
            {"rollout_correction": "nemo_icepop", "vllm_importance_sampling_clip_max": None},
            ["vllm_importance_sampling_clip_max=None both choose", '"bound_max"'],
        ),
        (
            {"rollout_correction": "monitor", "vllm_importance_sampling_correction": False},
            ["rollout_correction='monitor'", "nothing to correct"],
        ),
        ({"rollout_correction": "verl_sequence_is", "loss_type": "vespo"}, ["loss_type='vespo'", "level='sequence'"]),
        (
            {
                "rollout_correction": "nemo_icepop",
                "repetition_penalty": 1.1,
                "fp8_weights": False,
                "kv_cache_dtype": "auto",
                "use_vllm": True,
            },
            ["repetition_penalty=1.1", "another distribution"],
        ),
    ],
)
def test_impossible_combinations_are_refused(flags, words):
    with pytest.raises(ValueError) as error:
        FP8GRPOConfig("out", use_cpu=True, **flags)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_correction_can_be_used_without_fp8():
    off = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": True}
    args = FP8GRPOConfig("out", use_cpu=True, rollout_correction="nemo_icepop", **off)
    assert args.correction == PRESETS["nemo_icepop"].correction
    assert FP8GRPOConfig("out", use_cpu=True, **off).correction is None
