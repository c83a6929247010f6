"""The picture of a batch's log-probs holds the batch's tokens, each once, in the right bin."""

import math

import pytest
import torch

from trl_fp8.features.run_log.run_log import BINS, LIMIT, PAIRS, evenly_spaced, rollout_sample
from trl_fp8.run.batch import log_ratio


def test_each_scored_token_is_in_the_bin_of_its_ratio():
    log_r = torch.tensor([[0.0, 0.024, -0.026, 2.99], [-5.0, 5.0, 1.0, 0.5]])
    rollout = torch.full_like(log_r, -1.0)
    rollout[1, 3] = float("nan")  # missing
    mask = torch.ones_like(log_r)
    mask[1, 2] = 0  # padding
    read = rollout_sample(log_ratio(rollout.nan_to_num(-1.0) + log_r, rollout, mask))
    counts, width = read["log_ratio_counts"], 2 * LIMIT / BINS
    assert len(counts) == BINS + 2 and sum(counts) == 6 and read["log_ratio_limit"] == LIMIT
    for value in (0.0, 0.024, -0.026, 2.99):
        assert counts[1 + math.floor((value + LIMIT) / width)] >= 1
    assert counts[0] == 1 and counts[-1] == 1  # -5 and 5


def test_pairs_are_trainer_and_rollout_of_scored_tokens_only():
    torch.manual_seed(0)
    trainer, mask = -torch.rand(8, 64), (torch.rand(8, 64) < 0.5).int()
    rollout = trainer - 0.25
    pairs = rollout_sample(log_ratio(trainer, rollout, mask))["log_probs"]
    allowed = {round(value, 4) for value in trainer[mask.bool()].tolist()}
    assert PAIRS / 2 < len(pairs) <= PAIRS
    assert all(abs(t - r - 0.25) < 2e-5 and min(abs(round(t, 4) - a) for a in allowed) < 2e-4 for t, r in pairs)


def test_a_batch_without_tokens_is_an_empty_picture():
    empty = torch.zeros(2, 3)
    read = rollout_sample(log_ratio(empty, empty, torch.zeros(2, 3)))
    assert sum(read["log_ratio_counts"]) == 0 and read["log_probs"] == []
    assert rollout_sample(log_ratio(*[torch.zeros(2, 0)] * 3))["log_probs"] == []


@pytest.mark.parametrize("tokens", [1, 2, 1000, 2**24 + 4, 512 * 32_772])
def test_the_first_and_the_last_token_of_any_batch_are_read(tokens):
    """In FP32 the position of the last one would be rounded up, beyond the batch."""
    positions = evenly_spaced(tokens, 256, torch.device("cpu"))
    assert positions[0] == 0 and positions[-1] == tokens - 1 and len(positions) == min(256, tokens)
