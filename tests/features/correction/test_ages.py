"""Metrics of rollouts by age, against sums written out in FP64."""

import math

import pytest
import torch

from testing.rollout_batches import random_batch
from trl_fp8.features.correction.ages import age_metrics, of_age_0
from trl_fp8.features.correction.measures import measured, mismatch_metrics
from trl_fp8.run.batch import log_ratio, values_of


def test_each_age_has_its_own_mean_and_mismatch_is_of_fresh_tokens():
    trainer, rollout, mask = random_batch(6, 40, sigma=0.1, seed=1, dtype=torch.float64)
    ages = torch.tensor([0, 1, 2, 3, 4, 11])[:, None].expand_as(trainer)
    ratio = log_ratio(trainer, rollout, mask)
    values = values_of(measured(age_metrics(ratio, ages)))
    by_row = [(rollout - trainer)[row][mask[row].bool()] for row in range(6)]
    for name, of_age in (("0", by_row[0]), ("1", by_row[1]), ("2", by_row[2]), ("9+", by_row[5])):
        assert values[f"staleness/k1_kl/age_{name}"] == pytest.approx(of_age.mean().item())
        k3 = ((-of_age).exp() - 1 + of_age).mean().item()
        assert values[f"staleness/k3_kl/age_{name}"] == pytest.approx(k3)
    assert values["staleness/k1_kl/age_3-4"] == pytest.approx(torch.cat(by_row[3:5]).mean().item())
    assert not any(name.endswith("age_5-8") for name in values)
    beyond = torch.cat(by_row[1:]).mean() - by_row[0].mean()
    assert values["staleness/k1_beyond_mismatch"] == pytest.approx(beyond.item())
    assert values["staleness/age_max"] == 11
    stale = sum(len(row) for row in by_row[1:])
    assert values["staleness/fraction_stale"] == pytest.approx(stale / sum(map(len, by_row)))

    fresh = values_of(measured(mismatch_metrics(of_age_0(ratio, ages))))
    alone = values_of(measured(mismatch_metrics(log_ratio(trainer[:1], rollout[:1], mask[:1]))))
    for name in ("mismatch/k1_kl", "mismatch/k3_kl", "mismatch/logp_difference_max", "mismatch/ppl_ratio"):
        assert fresh[name] == pytest.approx(alone[name])


def test_a_batch_without_fresh_tokens_measures_no_mismatch():
    batch = random_batch(2, 5, sigma=0.1, seed=2, dtype=torch.float64)
    ratio, ages = log_ratio(*batch), torch.ones(2, 5, dtype=torch.long)
    assert math.isnan(values_of(measured(mismatch_metrics(of_age_0(ratio, ages))))["mismatch/k3_kl"])
    assert math.isnan(values_of(measured(age_metrics(ratio, ages)))["staleness/k1_beyond_mismatch"])


def test_drift_of_the_policy_is_told_from_the_format_where_both_are_known():
    """Rollouts are off by N(-m, 2 m), and the policy has moved since by N(-s, 2 s): k1 is m for fresh tokens, m + s
    for others, so that their difference is s.
    """
    generator = torch.Generator().manual_seed(0)
    mismatch, drift, shape = 0.02, 0.05, (200, 500)

    def log_r(kl: float) -> torch.Tensor:
        return -kl + (2 * kl) ** 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)

    ages = (torch.arange(shape[0]) % 2)[:, None].expand(shape)
    difference = log_r(mismatch) + ages * log_r(drift)
    ratio = log_ratio(difference, torch.zeros(shape, dtype=torch.float64), torch.ones(shape))
    values = values_of(measured(age_metrics(ratio, ages) | mismatch_metrics(of_age_0(ratio, ages))))
    # standard errors of means over 50,000 tokens: (2 m / n)^0.5 and (2 (m + s) / n)^0.5
    assert values["mismatch/k1_kl"] == pytest.approx(mismatch, abs=5 * (2 * mismatch / 5e4) ** 0.5)
    error = (2 * (2 * mismatch + drift) / 5e4) ** 0.5
    assert values["staleness/k1_beyond_mismatch"] == pytest.approx(drift, abs=5 * error)
