"""Losses other than GRPO's, of TRL or of a user: a correction reaches the loss, or is refused."""

import pytest
import torch
from trl.experimental.gmpo import GMPOTrainer

from testing.fake_rollout_engine import FakeEngineTrainer
from testing.runs import SMALL_K3, arguments, dataset, recorded, reward_digits, rows
from trl_fp8 import FP8GRPOTrainer


class GMPO(FakeEngineTrainer, GMPOTrainer):
    """As a user writes it, with another engine."""


class Doubled(FakeEngineTrainer):
    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


class Constant(FakeEngineTrainer):
    def _compute_loss(self, model, inputs):
        return sum(parameter.sum() for parameter in model.parameters())


TASK = {"reward_funcs": reward_digits, "train_dataset": dataset()}


def args_with(correction, folder, **flags):
    return arguments(folder, max_steps=1, kv_cache_dtype="auto", bf16=False, rollout_correction=correction, **flags)


def log_ratio(model, inputs):
    """Log-probs of the completions' tokens less those of the rollouts, by a plain forward `[B, T]`, and the mask."""
    prompts, completions = inputs["prompt_ids"], inputs["completion_ids"]
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(torch.cat([prompts, completions], 1), attention_mask=mask).logits[:, prompts.shape[1] - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    return log_probs - inputs["sampling_per_token_logps"], inputs["completion_mask"]


@pytest.mark.parametrize("correction", ["monitor", {"level": None, "bypass": True}], ids=["monitor", "bypass"])
def test_gmpo_trains_and_its_correction_is_one_that_its_loss_reads(correction, checkpoint, tmp_path):
    trainer = GMPO(checkpoint("qwen3"), args=args_with(correction, tmp_path, epsilon=0.4), **TASK)
    assert trainer.trl_class() is FP8GRPOTrainer.trl_class()
    losses = recorded(
        trainer,
        "_compute_loss",
        lambda loss, model, inputs: (loss.item(), *log_ratio(model, inputs), inputs["advantages"]),
    )
    trainer.train()
    [row], [(loss, log_r, mask, advantages)] = rows(trainer), losses
    assert 0 < row["mismatch/k3_kl"] < SMALL_K3 and (log_r * mask).abs().max() < 0.4  # nothing is clipped
    # The policy is the old one, unless the rollout's log-probs take its place
    means = (log_r * mask).sum(1) / mask.sum(1) if correction != "monitor" else torch.zeros(len(mask))
    expected = -(means.exp() * advantages).mean().item()
    assert loss == pytest.approx(expected, abs=1e-6)
    assert abs(expected + advantages.mean().item()) > 1e-4 or correction == "monitor"  # else the test is blind


@pytest.mark.parametrize(
    "correction", [None, {"level": None, "reject": ["token_ratio:0.5:2.0"]}], ids=["weights", "rejected-kept"]
)
@pytest.mark.parametrize("kind, by", [(GMPO, "GMPOTrainer"), (Constant, "Constant")])
def test_a_loss_that_reads_no_ratios_is_refused_by_name_before_an_engine_starts(
    kind, by, correction, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(kind, "_start_engine", lambda *_, **__: pytest.fail("an engine was started"))
    with pytest.raises(
        ValueError, match=f"{kind.__name__} with .*loss of {by} reads no .*rollout_correction='monitor'"
    ):
        kind(checkpoint("qwen3"), args=args_with(correction, tmp_path), **TASK)


def test_a_loss_that_calls_trls_is_corrected(checkpoint, tmp_path):
    Doubled(checkpoint("qwen3"), args=args_with(None, tmp_path), **TASK)
