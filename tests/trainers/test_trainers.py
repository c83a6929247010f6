"""TRL's trainers beside GRPO: real engines, equality with TRL when everything is off, and the correction of each."""

import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl.generation.vllm_generation as trl_generation
from trl import RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from testing.runs import arguments, column, recorded, rows, training
from trl_fp8 import FP8GMPOConfig, FP8GMPOTrainer, FP8RLOOConfig, FP8RLOOTrainer
from trl_fp8.trainers.sequence_weights import SequenceWeights


PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
OFF = {"fp8_weights": False, "kv_cache_dtype": "auto"}
RLOO = pytest.param(RLOOTrainer, RLOOConfig, FP8RLOOTrainer, FP8RLOOConfig, id="rloo")
GMPO = pytest.param(GMPOTrainer, GMPOConfig, FP8GMPOTrainer, FP8GMPOConfig, id="gmpo")


@pytest.mark.parametrize("trls_class, trls_config, trainer_class, config", [RLOO, GMPO])
def test_with_every_fp8_flag_off_it_is_trl_bit_for_bit(
    trls_class, trls_config, trainer_class, config, checkpoint, tmp_path
):
    results = []
    for kind, args in (
        (trls_class, arguments(tmp_path / "trl", trls_config, max_steps=2)),
        (trainer_class, arguments(tmp_path / "fp8", config, max_steps=2, **OFF)),
    ):
        with training(checkpoint("qwen3"), args, kind) as trainer:
            trainer.train()
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        results.append((column(trainer, "grad_norm"), weights))
    (trls_norms, trls_weights), (norms, weights) = results
    assert trls_norms == norms and len(norms) == 2 and all(norms)
    assert all(torch.equal(trls_weights[name], weights[name]) for name in trls_weights)


@pytest.mark.engine
@pytest.mark.parametrize(
    "trainer_class, config", [(FP8RLOOTrainer, FP8RLOOConfig), (FP8GMPOTrainer, FP8GMPOConfig)], ids=["rloo", "gmpo"]
)
def test_three_steps_are_audited_compared_and_corrected_by_sequence(trainer_class, config, checkpoint, tmp_path):
    args = arguments(tmp_path, config, vllm_max_model_length=64)
    with training(checkpoint("qwen3"), args, trainer_class) as trainer:
        losses = recorded(trainer, "_compute_loss", lambda loss, _, inputs: (loss.item(), inputs))
        trainer.train()
        logged = rows(trainer)
        assert len(logged) == 3 and trainer.vllm_generation.audit_failures == 0
        for row in logged:
            assert math.isfinite(row["loss"]) and row["fp8/sync_seconds"] > 0 and row["fp8/kv_scale_min"] > 0
            # As for GRPO (tests/trainer/test_trainer.py): log-probs of a stale engine are off by whole nats
            assert 0 < row["mismatch/logp_difference_mean"] < 0.3 and row["mismatch/fraction_missing"] == 0
            assert row["correction/weight_max"] <= 2.0
        for loss, inputs in losses:
            # The policy has not moved since it was scored, so both ratios are 1 up to FP32 rounding
            difference = inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]
            weights = (difference * inputs["completion_mask"]).sum(1).exp().clamp(max=2.0)
            assert loss == pytest.approx(-(weights * inputs["advantages"]).mean().item(), abs=1e-4)
            assert abs(loss + inputs["advantages"].mean().item()) > 1e-3  # else the test sees no weights


class Recorded:
    """Stands in for TRL's trainer, whose loss it is not about."""

    def _compute_loss(self, model, inputs):
        return inputs["advantages"]


class Weighted(SequenceWeights, Recorded):
    def __init__(self, correction):
        self.args = SimpleNamespace(correction=correction)


def test_trls_own_ratio_weighs_nothing_with_every_fp8_flag_off():
    inputs = {"advantages": torch.tensor([1.0, -1.0]), "importance_sampling_ratio": torch.tensor([[0.0], [3.0]])}
    assert Weighted(None)._compute_loss(None, inputs).tolist() == [1, -1]
    assert Weighted(object())._compute_loss(None, inputs).tolist() == [0, -3]


def test_the_weight_of_a_sequence_stands_at_its_first_trained_token():
    weights = torch.tensor([[1.0, 0.5, 0.5], [1.0, 1.0, 0.0]])
    inputs = {
        "advantages": torch.ones(2),
        "importance_sampling_ratio": weights,
        "completion_mask": torch.ones(2, 3, dtype=torch.long),
        "tool_mask": torch.tensor([[0, 1, 1], [0, 0, 1]]),
    }
    assert Weighted(object())._compute_loss(None, inputs).tolist() == [0.5, 0]


@pytest.mark.engine
def test_a_log_prob_that_is_missing_is_counted_by_rloo(checkpoint, tmp_path, monkeypatch):
    extract = trl_generation.extract_logprobs

    def without_one(outputs):
        logprobs, ids = extract(outputs)
        logprobs[0][0][0] = None  # as of a NaN
        return logprobs, ids

    monkeypatch.setattr(trl_generation, "extract_logprobs", without_one)
    args = arguments(tmp_path, FP8RLOOConfig, vllm_max_model_length=64, max_steps=1)
    with training(checkpoint("qwen3"), args, FP8RLOOTrainer) as trainer:
        trainer.train()
        assert 0 < rows(trainer)[0]["mismatch/fraction_missing"] < 0.1


@pytest.mark.engine
def test_rloo_takes_the_rollouts_log_probs_for_the_old_ones_with_bypass(checkpoint, tmp_path):
    correction = {"level": None, "bypass": True}
    args = arguments(tmp_path, FP8RLOOConfig, vllm_max_model_length=64, max_steps=1, rollout_correction=correction)
    with training(checkpoint("qwen3"), args, FP8RLOOTrainer) as trainer:
        losses = recorded(trainer, "_compute_loss", lambda loss, _, inputs: (loss.item(), inputs))
        trainer.train()
        [(loss, inputs)] = losses
        policy = inputs["old_logps"]  # TRL's, of the policy; the rest of the batch has the rollout's
        rollout = (inputs["sampling_per_token_logps"] * inputs["completion_mask"]).sum(1)
        ratio = (policy - rollout).exp()
        clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
        expected = -torch.min(ratio * inputs["advantages"], clipped * inputs["advantages"]).mean().item()
        assert loss == pytest.approx(expected, abs=1e-4)
        assert abs(expected + inputs["advantages"].mean().item()) > 1e-3


@pytest.mark.parametrize("config", [FP8RLOOConfig, FP8GMPOConfig])
@pytest.mark.parametrize(
    "flags, named",
    [
        ({"vllm_importance_sampling_mode": "token_mask"}, "level='token'"),
        ({"rollout_correction": {"level": "sequence", "reject": ["token_ratio:0.5:2"]}}, "reject='token_ratio'"),
        ({"rollout_correction": "verl_sequence_is_rs"}, "denominator='shrink'"),
    ],
)
def test_a_correction_of_tokens_is_refused_by_name(config, flags, named, tmp_path):
    with pytest.raises(ValueError, match=f"{config.__name__} with .*{named}: the loss has one ratio for a sequence"):
        arguments(tmp_path, config, **flags)
    assert arguments(tmp_path, config, rollout_correction="monitor").correction.monitor_only
    assert arguments(tmp_path, config).correction.level == "sequence"
    assert arguments(tmp_path, config, **OFF).correction is None


def test_constructor_is_trls():
    parameters = inspect.signature(FP8RLOOTrainer.__init__).parameters
    assert parameters == inspect.signature(RLOOTrainer.__init__).parameters


@pytest.mark.engine
def test_the_pages_own_trainer_has_fp8_rollouts_and_its_own_loss(checkpoint, tmp_path):
    section = PAGE.read_text().partition("## Other trainers")[2].partition("\n## ")[0]
    page = {}
    exec(section.partition("```python\n")[2].partition("```")[0], page)
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=1), page["FP8BoundedTrainer"]) as trainer:
        advantages = recorded(trainer, "_compute_loss", lambda _, __, inputs: inputs["advantages"])
        trainer.train()
        assert trainer.vllm_generation.audit_failures == 0 and "mismatch/k3_kl" in rows(trainer)[0]
        assert advantages[0].abs().max() == 1
