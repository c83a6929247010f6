"""The names of TRL's batch are TRL's, and a batch knows which of its tokens have a log-ratio."""

import inspect

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_fp8.run import batch as names
from trl_fp8.run.batch import COMPLETION_MASK, ROLLOUT_LOGPS, TOOL_MASK, TRAINER_LOGPS, Batch


TRLS = ("PROMPT_IDS", "COMPLETION_IDS", "COMPLETION_MASK", "TOOL_MASK", "TRAINER_LOGPS", "ROLLOUT_LOGPS")


@pytest.mark.parametrize("name", [*TRLS, "LOSS_WEIGHTS", "LOSS_TOKENS"])
def test_trl_returns_or_reads_each_name(name):
    assert f'"{getattr(names, name)}"' in inspect.getsource(grpo_trainer.GRPOTrainer)


def tensors(**others) -> dict[str, torch.Tensor]:
    trainer, rollout = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -2.0, -2.0]])
    return {COMPLETION_MASK: torch.tensor([[1, 1, 0]]), TRAINER_LOGPS: trainer, ROLLOUT_LOGPS: rollout, **others}


def test_a_ratio_is_of_tokens_that_the_policy_wrote():
    assert Batch(tensors()).ratio.values_BT.tolist() == [[0.5, 0.0, 0.0]]
    assert Batch(tensors()).ratio.mask_BT.tolist() == [[True, True, False]]
    with_tools = Batch(tensors(**{TOOL_MASK: torch.tensor([[0, 1, 1]])}))
    assert with_tools.mask_BT.tolist() == [[0, 1, 0]]
    assert with_tools.ratio.values_BT.tolist() == [[0.0, 0.0, 0.0]]


def test_a_ratio_stays_what_it_was_before_a_correction():
    batch = Batch(tensors())
    before = batch.ratio
    batch.tensors[TRAINER_LOGPS] = batch.tensors[ROLLOUT_LOGPS]
    assert batch.ratio is before


@pytest.mark.parametrize("missing", [TRAINER_LOGPS, ROLLOUT_LOGPS])
def test_there_is_no_ratio_without_both_sides(missing):
    batch = tensors()
    del batch[missing]
    assert Batch(batch).ratio is None
