"""The output head over survivors: values and gradients of what was sampled from, by an oracle in float64."""

import math

import numpy as np
import pytest
import torch

from testing import oracles
from trl_fp8.features.truncated_sampling import truncated_head as module
from trl_fp8.features.truncated_sampling.truncated_head import Rows, truncated_head


N, V, K = 7, 11, 4
TEMPERATURE, VOCABULARY_CHUNK = 0.7, 4
SURVIVORS = {0: [3], 1: [0, 3, 4, 10], 3: [7, 2, 9], 4: list(range(V)), 6: [8, 1]}  # nobody sampled 2 and 5
TARGETS = torch.tensor([3, 10, 0, 2, 5, 0, 8])
ON_LOG_PROBS, ON_ENTROPY = np.linspace(-1, 1.5, N), np.linspace(0.7, -0.4, N)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that tokens, survivors and vocabulary are cut in several places."""
    monkeypatch.setattr(module, "TOKENS_AT_A_TIME", 2)
    monkeypatch.setattr(module, "TOKEN_CHUNK_SIZE", 3)


def given():
    generator = torch.Generator().manual_seed(0)
    shapes = (N, K), (V, K), (V,)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def rows():
    counts = torch.tensor([len(SURVIVORS.get(token, ())) for token in range(N)])
    return Rows(counts, torch.tensor([token for kept in SURVIVORS.values() for token in kept]))


def logits(hidden, weight, bias, scale, cap):
    made = (hidden @ weight.T + bias) * scale
    return (made if cap is None else cap * np.tanh(made / cap)) / TEMPERATURE


def expected(tensors, scale, cap):
    """Log-probs and entropies of the tokens that were sampled, and the loss of all of them."""
    sampled = list(SURVIVORS)
    of_sampled = logits(*tensors, scale, cap)[sampled]
    log_probs, entropy = oracles.truncated(of_sampled, SURVIVORS.values(), TARGETS[sampled].tolist())
    return log_probs, entropy, ON_LOG_PROBS[sampled] @ log_probs + ON_ENTROPY[sampled] @ entropy


def slopes(tensors, index, scale, cap, step=1e-5):
    """Derivatives of the oracle's loss by each entry of one of the tensors: central differences, good to 1e-9."""
    found = np.zeros_like(tensors[index])
    for place in np.ndindex(found.shape):
        sides = []
        for sign in (1, -1):
            moved = [each.copy() for each in tensors]
            moved[index][place] += sign * step
            sides.append(expected(moved, scale, cap)[-1])
        found[place] = (sides[0] - sides[1]) / (2 * step)
    return found


@pytest.mark.parametrize("scale, cap", [(1.0, None), (0.5, None), (1.0, 3.0)])
def test_values_and_gradients_are_those_of_the_renormalized_distribution(scale, cap):
    tensors, survivors = given(), rows()
    options = (TARGETS, TEMPERATURE, VOCABULARY_CHUNK, cap, scale, ("log_probs", "entropy"))
    log_probs, entropy, *others = truncated_head(survivors).apply(*tensors, *options)
    assert others == [None] * 3 and len(survivors.counts_N) == len(survivors.ids_E) == 0
    on = [torch.tensor(each, dtype=torch.float32) for each in (ON_LOG_PROBS, ON_ENTROPY)]
    ((on[0] * log_probs).sum() + (on[1] * entropy).sum()).backward()
    exact = [each.detach().double().numpy() for each in tensors]
    wanted = expected(exact, scale, cap)
    sampled = list(SURVIVORS)
    for found, oracle in zip((log_probs, entropy), wanted, strict=False):
        assert np.abs(found.detach().numpy()[sampled] - oracle).max() < 2**-19  # FP32, values below 8
        assert found[[2, 5]].tolist() == [0, 0]
    for index, tensor in enumerate(tensors):
        wanted_gradient = slopes(exact, index, scale, cap)
        assert np.abs(tensor.grad.numpy() - wanted_gradient).max() < 1e-6 * max(1, np.abs(wanted_gradient).max()) * K
    # as over the whole vocabulary, they would be off by the mass that survives
    full, _ = oracles.truncated(logits(*exact, scale, cap)[sampled], [range(V)] * 5, TARGETS[sampled].tolist())
    gaps = np.array(wanted[0]) - full
    assert abs(gaps[3]) < 1e-12 and (np.delete(gaps, 3) > 0.05).all()  # everything survives of the fourth
    assert math.isclose(full[0], -gaps[0])  # one survivor: its probability is what was kept


def test_an_unused_entropy_costs_no_gradient():
    hidden, weight, bias = given()
    apply, options = truncated_head(rows()).apply, (TARGETS, TEMPERATURE, VOCABULARY_CHUNK, None, 1.0, ())
    log_probs, entropy, *_ = apply(hidden, weight.detach(), None, *options)
    log_probs.sum().backward()
    assert entropy is None and hidden.grad[[2, 5]].abs().max() == 0 < hidden.grad[[1, 3]].abs().min()
    of_one = hidden.grad[0]  # the only token that survived: its log-prob is 0 whatever the policy does
    assert of_one.abs().max() == 0


def test_a_batch_of_which_nothing_was_sampled_stays_connected():
    hidden, weight, bias = given()
    options = (TARGETS, TEMPERATURE, VOCABULARY_CHUNK, None, 1.0, ())
    none = Rows(torch.zeros(N, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    truncated_head(none).apply(hidden, weight, bias, *options)[0].sum().backward()
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_chunks_of_a_batch_take_their_own_survivors_and_no_more_than_there_are():
    survivors = rows()
    counts, ids = survivors.take(4)
    assert counts.tolist() == [1, 4, 0, 3] and ids.tolist() == [3, 0, 3, 4, 10, 7, 2, 9]
    assert survivors.take(3)[1].tolist() == [*range(V), 8, 1]
    with pytest.raises(RuntimeError, match="scores 1 tokens, but only 0 are left"):
        survivors.take(1)
