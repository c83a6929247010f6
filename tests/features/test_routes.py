"""Routes of a generation in TRL's padding."""

import math

import numpy as np
import pytest
import torch

from testing import tiny_models
from trl_fp8.features.router_replay.replay import RouterReplay
from trl_fp8.features.router_replay.routes import RolloutRoutes
from trl_fp8.recipe.names import NOWHERE


PROMPTS, TOKENS = [2, 3], [4, 6]  # of each sequence: its prompt, and all of it


@pytest.fixture
def replay():
    # the middle one of three layers has no router
    return RouterReplay(tiny_models.on_meta("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], num_experts=200))


def numbered(sequence: int) -> np.ndarray:
    """[T - 1, 3 layers, 2 experts] whose values say where they are from."""
    rows = 50 * sequence + np.arange(TOKENS[sequence] - 1)
    return np.stack([np.stack([rows + 100 * (layer == 2), rows + 10], -1) for layer in range(3)], 1).astype(np.uint8)


def test_prompts_end_and_completions_begin_where_trl_has_them(replay):
    routes = RolloutRoutes(replay, "rollout")
    routes.arrived([numbered(0), numbered(1)], PROMPTS)
    field = routes.batch_field(prompt_columns=4, columns=8)  # padded to multiples of four
    assert field.shape == (2, 8, 2, 2) and field.dtype == torch.int16  # 200 experts
    assert replay.layers == (0, 2)
    assert field[0, :, 0, 0].tolist() == [NOWHERE, NOWHERE, 0, 1, 2, NOWHERE, NOWHERE, NOWHERE]
    assert field[1, :, 0, 0].tolist() == [NOWHERE, 50, 51, 52, 53, 54, NOWHERE, NOWHERE]
    assert field[1, 1:6, 1].tolist() == [[150 + i, 60 + i] for i in range(5)]


def test_monitoring_and_policy_replay_put_nothing_of_the_rollout_into_the_batch(replay):
    for mode in ("monitor", "policy"):
        routes = RolloutRoutes(replay, mode)
        routes.arrived([numbered(0), numbered(1)], PROMPTS)
        assert routes.batch_field(4, 8) is None


def test_only_the_pass_over_a_new_generation_is_scored(replay):
    routes, device = RolloutRoutes(replay, "rollout"), torch.device("cpu")
    with routes.old_log_probs((2, 8), 4, device):
        assert replay._routes_BSLK is None  # nothing has arrived
    routes.arrived([numbered(0), numbered(1)], PROMPTS)
    with routes.old_log_probs((2, 8), 4, device):
        assert replay._routes_BSLK is not None
    with routes.old_log_probs((2, 8), 4, device):
        assert replay._routes_BSLK is None  # scored already
    measured = routes.metrics(lambda sums: sums).values()
    assert len(measured) == 2 and all(math.isnan(metric.value) for metric in measured)  # no forward has run
    assert routes.batch_field(4, 8).shape == (2, 8, 2, 2)
    with routes.old_log_probs((2, 8), 4, device):
        assert replay._routes_BSLK is None  # a training forward
