"""Methods that `FP8GRPOTrainer` overrides are TRL's on a trainer that was made without `__init__`."""

from types import SimpleNamespace

import pytest
from trl import GRPOTrainer

from trl_fp8 import FP8GRPOTrainer
from trl_fp8.run.batch import mean_of


def bare() -> FP8GRPOTrainer:
    """A trainer as TRL's tests of its dispatch make it."""
    trainer = object.__new__(FP8GRPOTrainer)
    trainer.args, trainer.model = SimpleNamespace(report_to=[]), SimpleNamespace(training=True)
    trainer._metrics = {"train": {}, "eval": {}}
    return trainer


@pytest.mark.parametrize(
    "method, arguments",
    [
        ("_generate", (["a"],)),
        ("_generate_single_turn", ([[1]],)),
        ("_get_per_token_logps_and_entropies", ("model", "ids", "mask", 1)),
        ("_generate_and_score_completions", ([],)),
        ("compute_loss", ("model", {})),
        ("training_step", ("model", {})),
        ("prediction_step", ("model", {})),
    ],
)
def test_methods_are_trls_on_a_trainer_without_init(method, arguments, monkeypatch):
    seen = []
    monkeypatch.setattr(GRPOTrainer, method, lambda self, *given: seen.append(given) or {"from": "TRL"})
    assert getattr(bare(), method)(*arguments) == {"from": "TRL"}
    assert seen == [arguments]


def test_a_reward_cannot_log_under_the_name_of_a_metric_of_ours():
    trainer = bare()
    trainer._metrics["train"] = {"mismatch/k3_kl": [0.5]}  # TRL's log_metric
    with pytest.raises(ValueError, match="log_metric.'mismatch/k3_kl', .* Give it another name"):
        trainer._add_metrics({"mismatch/k3_kl": mean_of(1.0)})
    trainer._metrics["train"] = {"fp8/sync_seconds": [mean_of(1.0), 0.5]}  # the reward was later than the sync
    with pytest.raises(ValueError, match="log_metric.'fp8/sync_seconds', .* Give it another name"):
        trainer.log({})
