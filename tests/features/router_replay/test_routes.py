"""Routes of a generation in TRL's padding."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from testing import tiny_models
from trl_fp8.features.router_replay.routes import Routes
from trl_fp8.recipe.names import NOWHERE
from trl_fp8.run.batch import Batch, Rollouts


PROMPTS, TOKENS = [2, 3], [4, 6]  # of each sequence: its prompt, and all of it
MASK = torch.ones(2, 8)


def numbered(sequence: int) -> np.ndarray:
    """[T - 1, 3 layers, 2 experts] whose values say where they are from."""
    rows = 50 * sequence + np.arange(TOKENS[sequence] - 1)
    return np.stack([np.stack([rows + 100 * (layer == 2), rows + 10], -1) for layer in range(3)], 1).astype(np.uint8)


@pytest.fixture
def model():
    # the middle one of three layers has no router
    return tiny_models.on_meta("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], num_experts=200)


def replayed(model, mode: str) -> Routes:
    """In a run whose engine answers with `numbered`."""
    trainer = SimpleNamespace(
        model=model,
        args=SimpleNamespace(router_replay=mode, beta=0.0),
        accelerator=SimpleNamespace(device=torch.device("cpu"), reduce=lambda tensor, how: tensor),
    )
    routes = Routes(trainer)
    routes.log = SimpleNamespace(notes_on=lambda sequences: [numbered(0), numbered(1)])
    return routes


def arrive(routes: Routes) -> None:
    routes.after_generation(Rollouts([[0] * n for n in PROMPTS], [[0] * 2, [0] * 3]))


def extended(routes: Routes) -> Batch:
    """Prompts and completions padded to multiples of four."""
    batch = Batch({"prompt_ids": torch.zeros(2, 4), "completion_ids": torch.zeros(2, 4)})
    routes.extend_batch(batch)
    return batch


def test_prompts_end_and_completions_begin_where_trl_has_them(model):
    routes = replayed(model, "rollout")
    arrive(routes)
    batch = extended(routes)
    field = batch.tensors["routed_experts"]
    assert field.shape == (2, 8, 2, 2) and field.dtype == torch.int16  # 200 experts
    assert routes.replay.layers == (0, 2)
    assert field[0, :, 0, 0].tolist() == [NOWHERE, NOWHERE, 0, 1, 2, NOWHERE, NOWHERE, NOWHERE]
    assert field[1, :, 0, 0].tolist() == [NOWHERE, 50, 51, 52, 53, 54, NOWHERE, NOWHERE]
    assert field[1, 1:6, 1].tolist() == [[150 + i, 60 + i] for i in range(5)]
    assert not batch.metrics  # TRL made no pass that could be compared


@pytest.mark.parametrize("mode", ["monitor", "policy"])
def test_monitoring_and_policy_replay_put_nothing_of_the_rollout_into_the_batch(mode, model):
    routes = replayed(model, mode)
    arrive(routes)
    assert "routed_experts" not in extended(routes).tensors


def test_only_the_pass_over_a_new_generation_is_scored(model):
    routes = replayed(model, "rollout")
    replay = routes.replay
    with routes.scoring(MASK, 4):
        assert replay._routes_BSLK is None  # nothing has arrived
    arrive(routes)
    with routes.scoring(MASK, 4):
        assert replay._routes_BSLK is not None
    with routes.scoring(MASK, 4):
        assert replay._routes_BSLK is None  # scored already
    batch = extended(routes)
    assert batch.tensors["routed_experts"].shape == (2, 8, 2, 2)
    measured = batch.metrics.values()
    assert len(measured) == 2 and all(math.isnan(metric.value) for metric in measured)  # no forward has run
    with routes.scoring(MASK, 4):
        assert replay._routes_BSLK is None  # a training forward
