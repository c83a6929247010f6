"""Features add tensors to TRL's batch under keys that TRL does not use."""

import inspect

import pytest
from trl.trainer.grpo_trainer import GRPOTrainer

from trl_fp8.features.kv_cache.kv_cache import ROLLOUT_SCALES
from trl_fp8.features.router_replay.routes import ROUTES
from trl_fp8.features.truncated_sampling.truncation import SURVIVOR_COUNTS, SURVIVOR_IDS


@pytest.mark.parametrize("key", [ROLLOUT_SCALES, ROUTES, SURVIVOR_COUNTS, SURVIVOR_IDS])
def test_trl_has_no_key_of_that_name(key):
    assert f'"{key}"' not in inspect.getsource(GRPOTrainer)
