"""Mismatch metrics against float64 oracles, over ranks, and in the cases where a metric is tempted to look fine."""

import math
import typing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import oracles
from testing.rollout_batches import batches, fp8_batch, pairs_to_logps, random_batch
from trl_fp8.features.correction.health import health_warnings
from trl_fp8.features.correction.importance import RolloutCorrection, correct
from trl_fp8.features.correction.measures import BIN_EDGES, measured, mismatch_metrics
from trl_fp8.features.correction.presets import PRESETS
from trl_fp8.features.correction.rejection import Rejection, Statistic
from trl_fp8.run.batch import log_ratio, values_of


def mismatch(*batch) -> dict[str, float]:
    """Of one batch on one rank."""
    return values_of(measured(mismatch_metrics(log_ratio(*batch))))


def assert_metrics_equal(actual, expected, rel=1e-6, absolute=1e-12):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=rel, abs=absolute, nan_ok=True), name


# ---- against the oracles ------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(batches())
def test_metrics_agree_with_the_oracle(batch):
    assert_metrics_equal(mismatch(*batch), oracles.mismatch(*(x.tolist() for x in batch), BIN_EDGES))


@pytest.mark.parametrize("shape", [(1, 10_000), (37, 300), (3, 1), (1, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_metrics_agree_with_the_oracle_on_random_batches(shape, dtype):
    trainer, rollout, mask = random_batch(*shape, sigma=0.1, seed=sum(shape), dtype=dtype)
    if mask.numel() > 50:
        mask[:, 5:9] = 0  # a tool call
        rollout[0, ::7], trainer[0, 3], trainer[0, 1] = math.nan, math.nan, -math.inf
    # the oracle gets the difference as fp32 rounded it, against a rollout log-prob of 0 (or NaN)
    difference = torch.where(rollout.isfinite(), trainer - rollout, trainer).double().tolist()
    expected = oracles.mismatch(difference, (rollout.double() * 0).tolist(), mask.tolist(), BIN_EDGES)
    assert_metrics_equal(mismatch(trainer, rollout, mask), expected)


@pytest.mark.parametrize("kl", [0.002, 0.05])
def test_estimates_of_a_known_kl(kl):
    """log r ~ N(-kl, 2 kl): KL = kl, chi2 = exp(2 kl) - 1, ESS = exp(-2 kl), and trainer / rollout PPL = exp(kl)."""
    n = 200_000
    metrics = mismatch(*fp8_batch(20, n // 20, kl))
    variance = 2 * kl
    error_k1 = 4 * math.sqrt(variance / n)
    # Var(k3) = E[k3^2] - kl^2; for small kl k3 ~ log_r^2 / 2, whose variance is variance^2 / 2; e^(3 variance) bounds
    # what the tail adds at the larger kl
    error_k3 = 4 * math.sqrt(variance**2 / 2 * math.exp(3 * variance) / n)
    assert abs(metrics["mismatch/k1_kl"] - kl) < error_k1
    assert abs(metrics["mismatch/k3_kl"] - kl) < error_k3 < error_k1
    error_r2 = 4 * math.exp(2 * variance) * math.sqrt((math.exp(4 * variance) - 1) / n)  # r^2 is lognormal
    assert abs(metrics["mismatch/chi2_token"] - (math.exp(variance) - 1)) < error_r2
    assert abs(metrics["correction/effective_sample_size"] - math.exp(-variance)) < error_r2
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(math.exp(kl), abs=error_k1)


def test_equal_log_probs_measure_exactly_nothing():
    trainer, _, mask = random_batch()
    metrics = mismatch(trainer, trainer.clone(), mask)
    for name, value in metrics.items():
        ones = ("ratio_min", "ratio_mean", "ratio_max", "ppl_ratio", "prob_error", "effective_sample_size")
        if "late_over_early" in name:
            assert math.isnan(value)  # 0 / 0
        else:
            assert value == (1.0 if name.endswith(ones) else 0.0), name


def test_the_sign_of_k1_is_that_of_rollout_over_trainer():
    """Tokens that the engine finds twice as likely as the trainer: KL(rollout || trainer) = log 2, PPL ratio 2."""
    metrics = mismatch(*pairs_to_logps([[0.5, 0.5]]))
    assert metrics["mismatch/k1_kl"] == pytest.approx(math.log(2))
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(2.0)
    assert metrics["correction/ratio_mean"] == pytest.approx(0.5)


# ---- nothing hides ------------------------------------------------------------------------------------------------


def test_missing_and_broken_tokens_are_counted_and_not_averaged():
    trainer, rollout, mask = pairs_to_logps([[2.0] * 10])
    rollout[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    trainer[0, 4] = math.nan
    mask[0, 9] = 0
    metrics = mismatch(trainer, rollout, mask)
    assert metrics["mismatch/fraction_missing"] == 3 / 9 and metrics["mismatch/fraction_broken"] == 1 / 9
    assert metrics["correction/ratio_mean"] == pytest.approx(2.0)
    trainer[0, 5] = rollout[0, 5] + 30.0
    assert mismatch(trainer, rollout, mask)["mismatch/fraction_clamped"] == 1 / 5


def test_nothing_to_measure_is_nan_and_not_a_perfect_zero():
    trainer, rollout, mask = random_batch()
    for batch in ((trainer, rollout, mask * 0), (trainer, rollout * math.nan, mask)):
        metrics = mismatch(*batch)
        for name in ("mismatch/k3_kl", "mismatch/logp_difference_max", "correction/ratio_min", "mismatch/ppl_ratio"):
            assert math.isnan(metrics[name]), name
        assert not any("position" in name or "length" in name for name in metrics)
    assert metrics["mismatch/fraction_missing"] == 1.0


def test_rejection_does_not_improve_the_metrics():
    """Half of the sequences are far off and rejected. Measured on what is left, the mismatch would look harmless."""
    trainer, rollout, mask = random_batch(B=8, T=40, sigma=0.02, dtype=torch.float64, padded=False)
    rollout[::2] -= 1.0
    corrected = correct(
        log_ratio(trainer, rollout, mask), RolloutCorrection(reject=(Rejection("geometric_ratio", 0.9, 1.1),))
    )
    assert corrected.keep_mask.any(-1).tolist() == [False, True] * 4
    after = mismatch(trainer, rollout, corrected.keep_mask)
    metrics = values_of(measured(mismatch_metrics(log_ratio(trainer, rollout, mask)) | corrected.metrics))
    assert after["mismatch/k3_kl"] < 1e-3 < 0.3 < metrics["mismatch/k3_kl"]
    assert metrics["correction/ratio_max"] > math.e * 0.9 and metrics["correction/fraction_clipped_high"] > 0.4
    assert metrics["correction/fraction_masked_sequences"] == metrics["correction/fraction_masked_tokens"] == 0.5
    assert metrics["correction/effective_sample_size_used"] == pytest.approx(0.5, rel=1e-2)


def test_truncation_does_not_hide_the_raw_ratio():
    trainer, rollout, mask = pairs_to_logps([[1.0] * 99 + [50.0]])
    corrected = correct(log_ratio(trainer, rollout, mask), RolloutCorrection(bound_max=2.0))
    assert corrected.weights.max() == 2.0
    metrics = mismatch(trainer, rollout, mask)
    assert metrics["correction/ratio_max"] == pytest.approx(50.0)
    assert metrics["correction/effective_sample_size"] == pytest.approx(149**2 / (100 * (99 + 2500)))
    assert values_of(measured(corrected.metrics))["correction/fraction_clipped_high"] == 0.01


# ---- does it grow along the completion? ---------------------------------------------------------------------------


def test_growth_along_the_completion_is_visible():
    generator = torch.Generator().manual_seed(0)
    B, T = 40, 2000
    noise = torch.randn(B, T, generator=generator, dtype=torch.float64)
    rollout, mask = torch.full((B, T), -1.0, dtype=torch.float64), torch.ones(B, T)
    flat = mismatch(rollout + 0.05 * noise, rollout, mask)
    growing = mismatch(rollout + 0.05 * noise * torch.linspace(0, 2, T).double(), rollout, mask)
    # flat: the two halves are means of n / 2 values of log_r^2 / 2, relative deviation sqrt(2) / sqrt(n / 2) each
    assert abs(flat["mismatch/late_over_early"] - 1) < 4 * 2 / math.sqrt(B * T / 2)
    # growing: k3 ~ x^2 / 2, and the integral of x^2 over the second half is 7 times that over the first
    assert growing["mismatch/late_over_early"] == pytest.approx(7.0, rel=0.1)
    bins = [growing[f"mismatch/k3_kl/position_{name}"] for name in ("16-63", "64-255", "256-1023", "1024-4095")]
    assert all(4 * a < b for a, b in zip(bins, bins[1:], strict=False))
    assert [name for name in growing if "length" in name] == ["mismatch/k3_kl/length_1024-4095"]


def test_length_bins_tell_long_completions_from_short_ones():
    trainer, rollout, mask = random_batch(B=20, T=300, sigma=0.02, padded=False)
    mask[10:, 20:] = 0
    rollout[:10] += 0.2
    metrics = mismatch(trainer, rollout, mask)
    lengths = {name: value for name, value in metrics.items() if "length" in name}
    assert list(lengths) == ["mismatch/k3_kl/length_16-63", "mismatch/k3_kl/length_256-1023"]
    short, long = lengths.values()
    assert short < 1e-3 < 0.01 < long
    assert metrics["mismatch/late_over_early"] == pytest.approx(1.0, rel=0.3)  # longer is worse, later is not


# ---- one vector, one collective, one read -------------------------------------------------------------------------


def together(ranks, gather=torch.stack) -> dict[str, float]:
    """Of several ranks, whose metrics have their parts on the device."""
    vectors = [torch.stack([p.double() for metric in rank.values() for p in metric.parts]) for rank in ranks]
    return values_of(measured(ranks[0], lambda values: gather(vectors)))


def merged(batches):
    """Metrics of several batches, merged as for one log."""
    whole = {}
    for metrics in batches:
        whole |= {name: whole[name] | metric if name in whole else metric for name, metric in metrics.items()}
    return whole


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 4), st.integers(0, 4))
def test_ranks_and_micro_batches_merge_to_the_whole(batch, first, second):
    cuts = [0, *sorted((min(first, len(batch[0])), min(second, len(batch[0])))), len(batch[0])]
    parts = [mismatch_metrics(log_ratio(*(x[a:b] for x in batch))) for a, b in zip(cuts, cuts[1:], strict=False)]
    whole = mismatch(*batch)
    assert_metrics_equal(values_of(merged(map(measured, parts))), whole, rel=1e-9)  # batches that one log is of
    for gather in (torch.stack, torch.cat):  # accelerate concatenates; stacking serves as well
        assert_metrics_equal(together(parts, gather), whole, rel=1e-9)


def test_a_mean_over_ranks_is_weighted_by_tokens():
    """One rank with 1 token and one with 99: the mean of the ranks' means would be 0.5 log 2,
    the mean is 0.01 log 2.
    """
    ranks = [pairs_to_logps([[0.5]]), pairs_to_logps([[1.0] * 99])]
    metrics = together([mismatch_metrics(log_ratio(*rank)) for rank in ranks])
    assert metrics["mismatch/k1_kl"] == pytest.approx(0.01 * math.log(2))


def test_what_travels_is_small():
    metrics = mismatch_metrics(log_ratio(*random_batch()))
    assert sum(len(metric.parts) for metric in metrics.values()) < 80


# ---- warnings -----------------------------------------------------------------------------------------------------


HEALTHY = {
    "correction/effective_sample_size": 0.71,
    "correction/sequence_effective_sample_size": 0.01,
    "mismatch/k3_kl": 0.043,  # SmolLM2-135M without a fault
    "correction/fraction_masked_sequences": 0.19,
    "correction/all_rejected": 0.0,
}


@pytest.mark.parametrize(
    "metric, value, level",
    [
        ("correction/effective_sample_size", 0.69, "token"),
        ("correction/sequence_effective_sample_size", 0.29, "sequence"),
        ("mismatch/k3_kl", 0.11, "token"),
        ("correction/fraction_masked_sequences", 0.21, "token"),
        ("correction/all_rejected", 1.0, "token"),
    ],
)
def test_each_threshold_warns_and_says_what_to_try(metric, value, level):
    healthy = HEALTHY | {"correction/sequence_effective_sample_size": 0.31 if level == "sequence" else 0.01}
    assert health_warnings(healthy, level) == {}
    assert health_warnings({}, level) == {} == health_warnings({metric: math.nan}, level)
    warnings = health_warnings(healthy | {metric: value}, level)
    assert list(warnings) == [metric]
    assert any(advice in warnings[metric] for advice in ("level=", "bound_max", "kv_cache_dtype=", "Widen"))


def test_monitoring_does_not_claim_that_something_was_dropped():
    warnings = health_warnings(HEALTHY | {"correction/all_rejected": 1.0}, "token", monitor_only=True)
    assert warnings["correction/all_rejected"].startswith("Monitor only")


# ---- the page -----------------------------------------------------------------------------------------------------


def test_the_page_names_every_preset_statistic_and_metric():
    page = (Path(__file__).resolve().parents[3] / "docs" / "rollout_correction.md").read_text()
    batch = random_batch()
    rules = (Rejection("token_veto", 1e-4),)
    metrics = mismatch(*batch)
    metrics |= values_of(measured(correct(log_ratio(*batch), RolloutCorrection(reject=rules)).metrics))
    families = ("k3_kl/position_", "k3_kl/length_", "sequence_ratio_", "geometric_ratio_", "fraction_rejected/")
    documented = {
        next((f"{name.split('/')[0]}/{family}*" for family in families if f"/{family}" in name), name)
        for name in metrics
        if not name.endswith(("sequence_effective_sample_size", "geometric_effective_sample_size"))
    }
    names = documented | set(PRESETS) | set(typing.get_args(Statistic))
    assert len(names) > 40
    assert sorted(name for name in names if f"`{name}`" not in page) == []
