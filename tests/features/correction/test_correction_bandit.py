"""What correction is for, on problems small enough to know the answer.

A policy p writes T tokens over V symbols with its own logits after every prefix; the engine samples from a perturbed
q. The on-policy gradient g* = E_p[A(s) grad log p(s)] is computed by enumeration of all V^T sequences. An estimator
multiplies the terms of sequences sampled from q by the weights of `correct`:

    g = mean over sequences of  sum_t  w_t A(s) grad log p(s_t | s_<t)

Since sequences can be enumerated, the bias and the variance of an estimator are exact sums over q, free of sampling
noise; what a batch of real size would see is then sampled, with confidence intervals over many independent problems.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from trl_fp8.features.correction.importance import RolloutCorrection, correct
from trl_fp8.run.batch import log_ratio


V, T = 4, 3
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=T)))  # [V^T, T]
# the logits that a token is drawn from: one row per prefix, prefixes of length 0, 1, .. numbered in base V
PREFIX_ROWS = torch.stack(
    [
        sum(V**k for k in range(t)) + sum((SEQUENCES[:, k] * V ** (t - 1 - k) for k in range(t)), torch.zeros(V**T))
        for t in range(T)
    ],
    dim=1,
).long()

UNCORRECTED = RolloutCorrection(level=None)
TOKEN_TIS = RolloutCorrection("token", bound_max=2.0)
SEQUENCE_TIS = RolloutCorrection("sequence", bound_max=2.0)
TOKEN_IS = RolloutCorrection("token", "mask", bound_max=None)  # a mask without bounds: plain importance sampling
SEQUENCE_IS = RolloutCorrection("sequence", "mask", bound_max=None)


def row_count():
    return sum(V**k for k in range(T))


@dataclass(frozen=True)
class Problem:
    """One random policy, engine and reward, fully enumerated."""

    p_logps: torch.Tensor  # [S, T] trainer log-probs of every sequence
    q_logps: torch.Tensor  # [S, T] rollout log-probs
    terms: torch.Tensor  # [S, T, rows * V] A(s) grad log p(s_t | s_<t) with respect to all logits
    on_policy: torch.Tensor  # [rows * V] g*

    @property
    def q(self):
        return self.q_logps.sum(-1).exp()

    def contributions(self, correction):
        """What each sequence adds to the gradient, [S, rows * V]."""
        mask = torch.ones_like(self.p_logps, dtype=torch.long)
        weights = correct(log_ratio(self.p_logps, self.q_logps, mask), correction).weights
        return (weights[:, :, None] * self.terms).sum(1)

    def bias_and_variance(self, correction):
        """Exact: the squared distance of E_q[g] from g*, and the total variance of one sequence's contribution."""
        contributions = self.contributions(correction)
        expectation = self.q @ contributions
        variance = self.q @ contributions.square().sum(-1) - expectation.square().sum()
        return (expectation - self.on_policy).square().sum().item(), variance.item()


def problem(seed, perturbation):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(row_count(), V, generator=generator, dtype=torch.float64)
    noisy = logits + perturbation * torch.randn(row_count(), V, generator=generator, dtype=torch.float64)
    rewards = torch.rand(len(SEQUENCES), generator=generator, dtype=torch.float64)
    p_logps, q_logps = (
        x.log_softmax(-1)[PREFIX_ROWS].gather(-1, SEQUENCES[..., None]).squeeze(-1) for x in (logits, noisy)
    )
    p = p_logps.sum(-1).exp()
    advantages = rewards - p @ rewards
    one_hot = torch.nn.functional.one_hot(SEQUENCES, V).double()
    scores = one_hot - logits.softmax(-1)[PREFIX_ROWS]  # [S, T, V] grad of log p with respect to its own row
    terms = torch.zeros(len(SEQUENCES), T, row_count(), V, dtype=torch.float64)
    terms.scatter_(2, PREFIX_ROWS[..., None, None].expand(-1, -1, 1, V), scores[:, :, None])
    terms = (terms * advantages[:, None, None, None]).flatten(2)
    return Problem(p_logps, q_logps, terms, on_policy=p @ terms.sum(1))


PROBLEMS = [problem(seed, perturbation=0.5) for seed in range(40)]


def interval(values):
    """Mean and 95 % confidence interval of independent values."""
    values = torch.tensor(values, dtype=torch.float64)
    half = 1.96 * values.std().item() / math.sqrt(len(values))
    return values.mean().item() - half, values.mean().item() + half


def sampled_error(instance, correction, size, replicates, seed):
    """Mean over `replicates` batches of the distance of the batch's gradient from g*; one seed, one set of samples."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(instance.q.expand(replicates, -1), size, replacement=True, generator=generator)
    frequencies = torch.zeros(replicates, len(SEQUENCES), dtype=torch.float64)
    frequencies.scatter_add_(1, drawn, torch.full(drawn.shape, 1 / size, dtype=torch.float64))
    estimates = frequencies @ instance.contributions(correction)
    return (estimates - instance.on_policy).norm(dim=-1).mean().item()


def test_the_enumeration_is_right():
    """Probabilities sum to 1 and g* is the gradient of the expected reward that autograd finds."""
    instance = PROBLEMS[0]
    for logps in (instance.p_logps, instance.q_logps):
        assert logps.sum(-1).exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(row_count(), V, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.randn(row_count(), V, generator=generator, dtype=torch.float64)
    rewards = torch.rand(len(SEQUENCES), generator=generator, dtype=torch.float64)
    logps = logits.log_softmax(-1)[PREFIX_ROWS].gather(-1, SEQUENCES[..., None]).squeeze(-1)
    (logps.sum(-1).exp() @ rewards).backward()
    torch.testing.assert_close(instance.on_policy, logits.grad.flatten(), rtol=1e-10, atol=1e-13)


def test_sequence_importance_sampling_is_unbiased_and_everything_else_is_not():
    for instance in PROBLEMS:
        scale = instance.on_policy.square().sum().item()
        bias, token_bias, uncorrected_bias = (
            instance.bias_and_variance(correction)[0] / scale for correction in (SEQUENCE_IS, TOKEN_IS, UNCORRECTED)
        )
        assert bias < 1e-20
        assert token_bias > 1e-4 and uncorrected_bias > 1e-4


def test_on_policy_rollouts_need_no_correction():
    instance = problem(0, perturbation=0.0)
    for correction in (UNCORRECTED, TOKEN_TIS, SEQUENCE_TIS, RolloutCorrection("geometric")):
        bias, _ = instance.bias_and_variance(correction)
        assert bias < 1e-24
        assert torch.equal(instance.contributions(correction), instance.contributions(UNCORRECTED))


@pytest.mark.parametrize("correction", [TOKEN_TIS, TOKEN_IS, SEQUENCE_TIS, SEQUENCE_IS])
def test_the_corrected_gradient_is_closer_to_the_on_policy_one(correction):
    """Batches of 4096 sequences, 40 problems, the same samples for both estimators: the error falls, at 95 %."""
    change = []
    for seed, instance in enumerate(PROBLEMS):
        corrected, plain = (sampled_error(instance, x, 4096, 20, seed) for x in (correction, UNCORRECTED))
        change.append(math.log(corrected / plain))
    low, high = interval(change)
    assert high < 0, f"the error changes by a factor in [{math.exp(low):.3f}, {math.exp(high):.3f}]"


def test_the_wrong_way_round_is_worse_than_nothing():
    """Weights made from 1/r instead of r: the check that this test would notice."""
    ratio = []
    for instance in PROBLEMS:
        swapped = Problem(instance.q_logps, instance.p_logps, instance.terms, instance.on_policy)
        expectation = instance.q @ swapped.contributions(SEQUENCE_TIS)
        plain = instance.bias_and_variance(UNCORRECTED)[0]
        ratio.append((expectation - instance.on_policy).square().sum().item() / plain)
    assert interval([math.log(x) for x in ratio])[0] > 0


CLIPS = [1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncation_trades_bias_for_variance(level):
    """Lowering C: variance falls, and the bias that truncation adds grows, at every step, exactly.

    That bias is measured against the same level without a bound, which for sequences is g* itself. Against g* the
    token level has a second bias, from prefixes that were sampled by q, which no C removes.
    """
    unbounded = RolloutCorrection(level, "mask", bound_max=None)
    steps = {clip: [] for clip in CLIPS[:-1]}
    for instance in PROBLEMS:
        limit = instance.q @ instance.contributions(unbounded)
        biases, variances = [], []
        for clip in CLIPS:
            correction = RolloutCorrection(level, bound_max=clip)
            biases.append((instance.q @ instance.contributions(correction) - limit).norm().item())
            variances.append(instance.bias_and_variance(correction)[1])
        for a, b in itertools.pairwise(range(len(CLIPS))):
            assert biases[a] >= biases[b] and variances[a] <= variances[b] * (1 + 1e-12), (CLIPS[a], CLIPS[b])
            steps[CLIPS[a]].append(biases[a] - biases[b])
        assert biases[0] > 0 and variances[0] < variances[-1]
    for clip, lost in steps.items():  # and not only by rounding: the steps are of positive size on average
        assert interval(lost)[0] > 0, clip


def test_the_best_clip_depends_on_the_batch_size():
    """Mean squared error = bias^2 + variance / n, exact: small batches want a low C, large batches a high one."""

    def best(size):
        errors = {}
        for clip in CLIPS:
            parts = [instance.bias_and_variance(RolloutCorrection("sequence", bound_max=clip)) for instance in HARD]
            errors[clip] = sum(bias + variance / size for bias, variance in parts)
        return min(errors, key=errors.get)

    HARD = [problem(seed, perturbation=1.5) for seed in range(20)]
    clips = [best(size) for size in (4, 64, 4096, 10**6)]
    assert clips == sorted(clips) and clips[0] < 2.0 < 5.0 <= clips[-1], clips
