"""Correction against float64 oracles, against TRL's formula bit for bit, and at every edge that has hurt others."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOTrainer

from testing import oracles
from testing.rollout_batches import batches, pairs_to_logps, policy_losses, random_batch
from trl_fp8.features.correction.importance import RolloutCorrection, correct
from trl_fp8.features.correction.measures import measured, mismatch_metrics
from trl_fp8.features.correction.presets import PRESETS
from trl_fp8.features.correction.rejection import Rejection
from trl_fp8.run.batch import log_ratio, values_of


UNWEIGHTED = RolloutCorrection(level=None)


def parts(corrected) -> list[float]:
    """All numbers that its metrics are made of."""
    return [part.item() for metric in corrected.metrics.values() for part in metric.parts]


def metrics_of(corrected):
    return values_of(measured(corrected.metrics))


# ---- against the oracles ------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    batches(),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from([(None, 2.0), (0.5, 5.0), (0.3, None), (0.0, 1.0)]),
    st.booleans(),
)
def test_weights_agree_with_the_oracle(batch, level, bound, band, normalize):
    low, high = band
    correction = RolloutCorrection(level, bound, low, high, batch_normalize=normalize)
    expected, margin = oracles.importance_weights(*(x.tolist() for x in batch), level, bound, low, high, normalize)
    # exactly on a bound both answers of `mask` are right, and exp(0) = 1 = bound is exact on both sides
    assume(bound == "truncate" or margin > 1e-9 or high == 1.0)
    weights = correct(log_ratio(*batch), correction).weights
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, torch.tensor(expected.reshape(weights.shape)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_tokens(level, dtype, seed):
    batch = random_batch(B=2, T=10_000, sigma=0.05, seed=seed, dtype=dtype, padded=False)
    expected, _ = oracles.importance_weights(*(x.tolist() for x in batch), level, "truncate", None, 2.0)
    weights = correct(log_ratio(*batch), RolloutCorrection(level)).weights.double()
    if dtype is torch.float64:
        rtol = 1e-6
    else:
        # The relative error of exp(x) is the absolute error of x. Each difference is rounded once, by half an ulp of
        # itself; over a sequence these n errors add like a random walk (4 standard deviations), and a tree of
        # log2(n) additions rounds partial sums, which stay below 16 here. Then exp: 2 ulp.
        half_ulp, n = torch.finfo(dtype).eps / 2, 10_000
        largest = float((batch[0] - batch[1]).abs().max())
        in_sum = (4 * math.sqrt(n) * largest + math.log2(n) * 16) * half_ulp
        rtol = 4 * half_ulp + {"token": largest * half_ulp, "sequence": in_sum, "geometric": in_sum / n}[level]
        assert rtol < 3e-5
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=rtol, atol=0)


# ---- TRL, bit for bit ---------------------------------------------------------------------------------------------


def trl_ratio(old_logps, sampling_logps, mask, mode, clip_min, clip_max):
    """TRL 1.16's `vllm_importance_sampling_ratio`, from its documented formula and order of operations."""
    difference = torch.nan_to_num((old_logps - sampling_logps) * mask, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=clip_min, max=clip_max)
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), value=0.0)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("clip", [(None, 3.0), (0.5, 2.0), (0.8, None)])
@pytest.mark.parametrize("T", [0, 1, 64, 1003])
@pytest.mark.parametrize("sigma", [0.02, 0.3])
def test_trl_modes_are_reproduced_bit_for_bit(mode, clip, T, sigma):
    trainer, rollout, mask = random_batch(5, T, sigma / max(1.0, math.sqrt(T / 64)), seed=T)
    mask[3] = 0
    if T > 5:
        rollout[0, 2] = math.nan
        mask[1, 3:5] = 0  # a tool call
    correction = RolloutCorrection.from_trl_mode(mode, *clip)
    corrected = correct(log_ratio(trainer, rollout, mask), correction)
    theirs = trl_ratio(trainer, rollout, mask, mode, *clip)
    assert torch.equal(corrected.loss_weights, theirs)  # (B, 1) for sequences, as TRL has it
    assert torch.equal(corrected.weights, torch.where(mask.bool(), theirs, 1.0))
    assert torch.equal(corrected.keep_mask, mask.bool())


@settings(max_examples=100, deadline=None)
@given(batches(st.floats(-9.0, 0.0, width=32)), st.sampled_from(["token_truncate", "token_mask"]), st.booleans())
def test_trl_token_modes_on_arbitrary_ordinary_log_probs(batch, mode, transposed):
    trainer, rollout, mask = batch[0].float(), batch[1].float(), batch[2]
    if transposed:
        trainer, rollout, mask = trainer.T, rollout.T, mask.T
    ours = correct(log_ratio(trainer, rollout, mask), RolloutCorrection.from_trl_mode(mode, 0.5, 2.0)).weights
    assert torch.equal(ours, trl_ratio(trainer, rollout, mask, mode, 0.5, 2.0))


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_columns", [1, 50])
def test_losses_and_gradients_equal_trls(mode, loss_columns):
    """Also for a (B, 1) loss (sequence-level policy ratio),
    whose backward would round differently with (B, T) weights.
    """
    trainer, rollout, mask = random_batch(sigma=0.1)
    corrected = correct(log_ratio(trainer, rollout, mask), RolloutCorrection.from_trl_mode(mode, None, 2.0))
    theirs = trl_ratio(trainer, rollout, mask, mode, None, 2.0)
    loss = torch.randn(6, loss_columns, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for ours, other in zip(
        policy_losses(loss, corrected.loss_weights, mask).values(),
        policy_losses(loss, theirs, mask).values(),
        strict=True,
    ):
        assert torch.equal(ours, other)
        assert torch.equal(*(torch.autograd.grad(x, loss, retain_graph=True)[0] for x in (ours, other)))
    for ours, other in zip(
        policy_losses(loss, corrected.weights, mask).values(), policy_losses(loss, theirs, mask).values(), strict=True
    ):
        assert torch.equal(ours, other)  # the broadcast weights give the same loss


# ---- what a weight is where there is nothing to correct -----------------------------------------------------------


ALL = {
    **{name: preset.correction for name, preset in PRESETS.items()},
    "geometric": RolloutCorrection("geometric"),
    "lowest bound is 1": RolloutCorrection("token", "mask", 1.0, 2.0),
    "highest bound is 1": RolloutCorrection("sequence", "mask", None, 1.0),
    "everything": RolloutCorrection(
        "geometric",
        "mask",
        0.5,
        2.0,
        reject=(
            Rejection("token_ratio", maximum=2.5),
            Rejection("token_veto", minimum=1e-4),
            Rejection("sequence_ratio", 0.5, 2.0),
            Rejection("geometric_ratio", 0.9, 1.2, centre="measured"),
        ),
        batch_normalize=True,
        denominator="shrink",
    ),
}


@pytest.mark.parametrize("correction", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_log_probs_give_weights_of_exactly_one(correction, dtype):
    trainer, _, mask = random_batch(dtype=dtype)
    corrected = correct(log_ratio(trainer, trainer.clone(), mask), correction)
    assert torch.equal(corrected.weights, torch.ones(6, 50))
    assert torch.equal(corrected.loss_weights, torch.ones_like(corrected.loss_weights))
    assert torch.equal(corrected.keep_mask, mask.bool()) and torch.equal(corrected.loss_mask, mask.bool())
    loss = torch.randn(6, 50)
    for ours, uncorrected in zip(
        policy_losses(loss, corrected.loss_weights, corrected.loss_mask).values(),
        policy_losses(loss, torch.ones(()), mask).values(),
        strict=True,
    ):
        assert torch.equal(ours, uncorrected)


@pytest.mark.parametrize("correction", ALL.values(), ids=ALL.keys())
def test_nothing_at_padding_reaches_the_result(correction):
    clean = random_batch()
    dirty = [x.clone() for x in clean]
    padding = clean[2] == 0
    for tensor, junk in zip(dirty[:2], (math.nan, -math.inf), strict=True):
        tensor[padding] = junk
    dirty[1][padding.nonzero(as_tuple=True)[0][0], -1] = 1e30
    expected, corrected = correct(log_ratio(*clean), correction), correct(log_ratio(*dirty), correction)
    assert torch.equal(corrected.weights, expected.weights)
    assert torch.equal(corrected.keep_mask, expected.keep_mask)
    assert parts(corrected) == parts(expected)
    assert (corrected.weights[padding] == 1).all() and not corrected.keep_mask[padding].any()
    if corrected.loss_weights.shape == padding.shape:
        assert (corrected.loss_weights[padding] == 1).all()


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from(sorted(ALL)))
def test_no_input_makes_a_nan_or_a_gradient(batch, name):
    trainer, rollout, mask = batch
    corrected = correct(log_ratio(trainer.requires_grad_(), rollout.requires_grad_(), mask), ALL[name])
    for tensor in (corrected.weights, corrected.loss_weights):
        assert torch.isfinite(tensor).all() and (tensor >= 0).all()
    for tensor in vars(corrected).values():
        assert not getattr(tensor, "requires_grad", False)
    assert not any(map(math.isnan, parts(corrected)))


def test_a_token_without_rollout_log_prob_is_not_corrected_and_not_held_against_its_sequence():
    trainer, rollout, mask = pairs_to_logps([[1.5, 1.2, 1.2]])
    rollout[0, 0] = math.nan
    levels = ("token", "sequence", "geometric")
    weights = {level: correct(log_ratio(trainer, rollout, mask), RolloutCorrection(level)).weights for level in levels}
    torch.testing.assert_close(weights["token"], torch.tensor([[1.0, 1.2, 1.2]]).double())
    torch.testing.assert_close(weights["sequence"], torch.full((1, 3), 1.44).double())
    torch.testing.assert_close(weights["geometric"], torch.full((1, 3), 1.2).double())
    normalized = correct(log_ratio(trainer, rollout, mask), RolloutCorrection(batch_normalize=True)).weights
    assert normalized[0].tolist() == [1.0, 1.0, 1.0]
    for rule in (Rejection("token_ratio", 0.9, 1.3), Rejection("geometric_ratio", 0.9, 1.3)):
        assert correct(log_ratio(trainer, rollout, mask), replace(UNWEIGHTED, reject=(rule,))).keep_mask.all()


def test_log_ratios_are_clamped_before_exp():
    trainer, rollout, mask = torch.tensor([[-1.0, -200.0]]), torch.tensor([[-200.0, -1.0]]), torch.ones(1, 2)
    weights = correct(log_ratio(trainer, rollout, mask), RolloutCorrection(bound="mask", bound_max=None)).weights
    assert torch.equal(weights, torch.exp(torch.tensor([[20.0, -20.0]])))
    nine = [x[:, :1].expand(1, 9) for x in (trainer, rollout, mask)]
    long = correct(log_ratio(*nine), RolloutCorrection("sequence", "mask", bound_max=None))
    assert torch.equal(long.weights, torch.exp(torch.full((1, 9), 20.0)))  # and not exp(180) = inf in fp32


# ---- other ways to use it ------------------------------------------------------------------------------------------


def test_icepop_zeroes_weights_and_leaves_the_mask():
    batch = pairs_to_logps([[0.4, 0.8, 6.0]])
    corrected = correct(log_ratio(*batch), RolloutCorrection("token", "mask", 0.5, 5.0))
    torch.testing.assert_close(corrected.weights, torch.tensor([[0.0, 0.8, 0.0]]).double())
    assert corrected.keep_mask.all() and torch.equal(corrected.loss_mask, batch[2].bool())
    metrics = metrics_of(corrected)
    assert metrics["correction/fraction_clipped_high"] == metrics["correction/fraction_clipped_low"] == 1 / 3
    assert metrics["correction/fraction_masked_tokens"] == pytest.approx(2 / 3)
    assert metrics["correction/effective_sample_size_used"] == pytest.approx(1 / 3)  # one token of three is left


def test_a_batch_with_all_weights_masked_is_not_divided_by_zero():
    batch = pairs_to_logps([[9.0, 8.0]])
    corrected = correct(log_ratio(*batch), RolloutCorrection("token", "mask", batch_normalize=True))
    assert corrected.weights.tolist() == [[0.0, 0.0]]
    assert metrics_of(corrected)["correction/all_rejected"] == 1.0


def test_monitor_only_reports_and_changes_nothing():
    batch = random_batch(sigma=0.5)
    applied = RolloutCorrection("sequence", "mask", 0.5, 2.0, reject=(Rejection("token_ratio", 0.7, 1.4),))
    watched = correct(log_ratio(*batch), replace(applied, monitor_only=True))
    assert torch.equal(watched.weights, torch.ones(6, 50)) and torch.equal(watched.loss_weights, torch.ones(6, 50))
    assert torch.equal(watched.keep_mask, batch[2].bool()) and torch.equal(watched.loss_mask, batch[2].bool())
    assert parts(watched) == parts(correct(log_ratio(*batch), applied))
    assert metrics_of(watched)["correction/fraction_masked_tokens"] > 0.2  # it would have done something


def test_bypass_makes_the_policy_ratio_the_correction():
    trainer, rollout, mask = random_batch(sigma=0.5)
    rollout[0, 1], rollout[2, 2], trainer[1, 0] = math.nan, -500.0, math.nan
    corrected = correct(log_ratio(trainer, rollout, mask), replace(UNWEIGHTED, bypass=True))
    assert torch.equal(corrected.loss_weights, torch.ones(6, 50))
    expected = torch.where(mask.bool(), rollout, trainer)
    expected[0, 1], expected[2, 2] = trainer[0, 1], trainer[2, 2] - 20  # no log-prob; ratio clamped at exp(20)
    assert torch.equal(corrected.old_logps, expected)
    assert not corrected.old_logps.isnan().any()
    assert correct(log_ratio(trainer, rollout, mask), UNWEIGHTED).old_logps is None


# ---- VESPO --------------------------------------------------------------------------------------------------------


def test_log_weights_sum_to_the_log_of_the_sequence_ratio_where_vespo_needs_it():
    trainer, rollout, mask = random_batch(sigma=0.02, dtype=torch.float64)
    log_r = ((trainer - rollout) * mask).sum(-1)
    summed = {}
    for level in ("token", "geometric", "sequence"):
        correction = RolloutCorrection(level)
        corrected = correct(log_ratio(trainer, rollout, mask), correction)
        summed[level] = corrected.weights.log().sum(-1)  # over all T, unmasked
        assert correction.fits_vespo == torch.allclose(summed[level], log_r, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(summed["sequence"], log_r * mask.sum(-1))  # counted once per token: refuse it


# ---- over ranks and micro-batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "geometric", None])
def test_vespo_under_shrink_is_that_of_the_tokens_that_are_left(level):
    """TRL sums log(weight) over all tokens, also over those that the mask of its loss leaves out."""
    batch = random_batch(B=6, T=20)
    rule = Rejection("token_ratio", 0.8, 1.25)
    done = correct(log_ratio(*batch), RolloutCorrection(level=level, reject=(rule,), denominator="shrink"))
    weights, mask = done.loss_weights, done.loss_mask
    assert not mask.all() and mask.any(1).all()
    generator = torch.Generator().manual_seed(1)
    advantages, log_r = torch.randn(6, 1, generator=generator), 0.1 * torch.randn(6, 20, generator=generator)
    whole = GRPOTrainer.get_gamma_weights(advantages, log_r, mask, weights)
    for row, kept in enumerate(mask):
        left = weights[row : row + 1, kept]
        alone = (advantages[row : row + 1], log_r[row : row + 1, kept], torch.ones_like(left), left)
        assert torch.allclose(whole[row], GRPOTrainer.get_gamma_weights(*alone)[0], rtol=1e-4), row


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_batch_normalization_and_centre_are_global(level):
    """Three ranks with different numbers of sequences and tokens; each sees only the sum that the hook returns."""
    batch = random_batch(B=9, sigma=0.4, dtype=torch.float64)
    rule = Rejection("geometric_ratio", 0.97, 1.03, centre="measured")
    correction = RolloutCorrection(level, bound_max=1.5, batch_normalize=True, reject=(rule,))
    ranks = [[x[a:b] for x in batch] for a, b in ((0, 1), (1, 4), (4, 9))]
    local_sums = []

    def record(local):
        local_sums.append(local)
        return local

    apart = torch.cat([correct(log_ratio(*rank), correction, all_reduce=record).weights for rank in ranks])
    assert len(local_sums) == 3  # one collective per call
    total = torch.stack(local_sums).sum(0)
    corrected = [correct(log_ratio(*rank), correction, all_reduce=lambda local: total) for rank in ranks]
    together = torch.cat([one.weights for one in corrected])
    expected, _ = oracles.importance_weights(*(x.tolist() for x in batch), level, "truncate", None, 1.5, True)
    torch.testing.assert_close(together, torch.tensor(expected), rtol=1e-12, atol=0)
    assert not torch.allclose(apart, together, rtol=1e-3)  # what every rank for itself would have done
    centres = [metrics_of(one)["correction/log_centre"] for one in corrected]
    assert centres == [min(0.0, float(total[0] / total[1]))] * 3
    gathered = torch.tensor([parts(one) for one in corrected], dtype=torch.float64)
    metrics = values_of(measured(corrected[0].metrics, lambda _: gathered))
    assert metrics["correction/batch_norm_factor"] == pytest.approx(float(total[2] / total[3]), rel=1e-12)
    kept = sum(int(one.keep_mask.sum()) for one in corrected)
    assert metrics["correction/fraction_masked_tokens"] == pytest.approx(1 - kept / int(batch[2].sum()), abs=1e-12)


def test_the_hook_is_called_by_every_rank_or_by_none():
    calls = []
    batch, empty = random_batch(), [x[:0] for x in random_batch()]
    for correction in ALL.values():
        for rank in (batch, empty):
            correct(log_ratio(*rank), correction, all_reduce=lambda local: calls.append(local.shape) or local)
        assert calls == ([(4,), (4,)] if correction.needs_all_reduce else [])
        calls.clear()


class NoHostReads(TorchDispatchMode):
    """Fails on what waits for the device: reading a value, or making a shape from values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.FORBIDDEN, f"{func} synchronizes with the host"
        out = func(*args, **(kwargs or {}))
        indices = args[1] if "index" in func.overloadpacket.__name__ and len(args) > 1 else ()
        assert not any(getattr(x, "dtype", None) is torch.bool for x in indices or ()), (
            "indexing by a mask synchronizes"
        )
        return out


def test_nothing_is_read_on_the_host():
    batch = random_batch()
    with NoHostReads():
        for correction in ALL.values():
            corrected = correct(log_ratio(*batch), correction)
            metrics = mismatch_metrics(log_ratio(*batch)) | corrected.metrics
    both = measured(metrics, lambda values: torch.cat([values, values]))
    assert both["mismatch/fraction_missing"].parts == (0, 2 * int(batch[2].sum()))
    for read in (lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: bool(x.any())):
        with pytest.raises(AssertionError, match="synchronizes"), NoHostReads():
            read(batch[0])


# ---- what cannot be meant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(level="batch"), "level='batch'"),
        (dict(bound="clip"), "bound='clip'"),
        (dict(denominator="both"), "denominator='both'"),
        (dict(bound_max=None), "nothing to truncate"),
        (dict(bound_max=True), "bound_max=True"),
        (dict(bound_max=math.nan), "finite"),
        (dict(bound_max=0.9), "bound_max=0.9 must be at least 1"),
        (dict(bound_min=1.1), r"bound_min=1.1 must lie in \[0, 1\]"),
        (dict(bound_min=1.0, bound_max=1.0), "exact agreement"),
        (dict(level=None, batch_normalize=True), "no weights to normalize"),
        (dict(bypass=True), "ratio enters twice"),
        (dict(level=None, bypass=True, monitor_only=True), "choose one"),
        (dict(reject=[Rejection("token_veto", 1e-4)]), "tuple"),
        (dict(reject=(Rejection("token_veto", 0.1), Rejection("token_veto", 0.2))), "twice"),
    ],
)
def test_a_correction_that_cannot_be_meant_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(**fields)


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError) as error:
        RolloutCorrection(level="batch", bound="clip", denominator="both")
    assert all(name in str(error.value) for name in ("level='batch'", "bound='clip'", "denominator='both'"))


def test_a_mode_that_trl_does_not_have_is_refused():
    with pytest.raises(ValueError, match="level='paragraph'"):
        RolloutCorrection.from_trl_mode("paragraph_mask", None, 2.0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 1\) and \(2, 3\)"):
        log_ratio(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3))
