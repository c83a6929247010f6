"""Survivors of sequences, brought to the tokens that TRL's output head scores."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl.trainer.utils as trl_utils

from trl_fp8.engine.protocol import Survivors
from trl_fp8.features.truncated_sampling.truncation import BatchSurvivors, Truncation, of_batch
from trl_fp8.run.batch import COMPLETION_IDS, COMPLETION_MASK, ROLLOUT_LOGPS, Batch


# The end of the first one's prompt is what another rollout sampled; the second is a conversation, with two tokens of a
# tool's result between two that were sampled
SEQUENCES = [
    Survivors(np.array([0, 2, 2, 1], np.int32), np.array([3, 4, 5, 6, 7], np.int32)),
    Survivors(np.array([0, 0, 0, 1, 0, 0, 2], np.int32), np.array([8, 9, 10], np.int32)),
]
PROMPTS = [2, 3]
#                          prompts    completions
MASK = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]])
COLUMNS = 5  # TRL pads to a multiple


def test_rows_are_those_that_trl_scores(monkeypatch):
    batch = of_batch(SEQUENCES, PROMPTS)
    assert batch.counts_BT.tolist() == [[2, 1, 0, 0], [1, 0, 0, 2]] and batch.ids_BM.tolist() == [
        [5, 6, 7],
        [8, 9, 10],
    ]
    for triton, counts in ((False, [0, 0, 2, 1, 0, 0, 0, 0, 0, 1, 0, 0, 2, 0]), (True, [2, 1, 1, 0, 0, 2])):
        monkeypatch.setattr(trl_utils, "_use_triton", lambda device, triton=triton: triton)
        rows = batch.rows(MASK, COLUMNS)
        assert rows.counts_N.tolist() == counts and rows.ids_E.tolist() == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("triton, counts", [(False, [0] * 9 + [1, 0, 0, 2, 0]), (True, [1, 0, 0, 2])])
def test_completions_that_are_masked_have_no_rows(triton, counts, monkeypatch):
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: triton)
    mask = MASK.clone()
    mask[0, -COLUMNS:] = 0  # as mask_truncated_completions does
    rows = of_batch(SEQUENCES, PROMPTS).rows(mask, COLUMNS)
    assert rows.counts_N.tolist() == counts and rows.ids_E.tolist() == [8, 9, 10]


def test_rows_of_a_batch_may_be_shuffled_and_split():
    batch = BatchSurvivors(*(tensor[[1]] for tensor in of_batch(SEQUENCES, PROMPTS)))
    assert batch.rows(MASK[[1]], COLUMNS).ids_E.tolist() == [8, 9, 10]


SAMPLED = torch.tensor([[6, 7, 0, 0, 0], [8, 6, 7, 9, 0]])  # 6 and 7 of the second are a tool's


def extended(tokens):
    """The batch of the completions `tokens` after `extend_batch`."""
    feature = Truncation(SimpleNamespace(accelerator=SimpleNamespace(reduce=lambda totals, _: totals)))
    feature._current = of_batch(SEQUENCES, PROMPTS)
    tool = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]])
    batch = Batch({COMPLETION_IDS: tokens, COMPLETION_MASK: MASK[:, -COLUMNS:] * tool, ROLLOUT_LOGPS: tool - 2.0})
    feature.extend_batch(batch)
    return batch


def test_sampled_tokens_that_did_not_survive_are_an_error():
    assert extended(SAMPLED).metrics["sampling/survivors_mean"].value == 6 / 4
    for sequence, position, survivors in ((0, 0, (5, 6)), (0, 1, (7,)), (1, 0, (8,)), (1, 3, (9, 10))):
        for token in range(12):
            tokens = SAMPLED.clone()
            tokens[sequence, position] = token
            if token in survivors:
                extended(tokens)
            else:
                with pytest.raises(RuntimeError, match="of 4 tokens, but for 1 of them .* sampled token is not among"):
                    extended(tokens)
