"""The sync on CUDA: kernels, CUDA graphs and FlashAttention. Run with `pytest -m gpu`.

Written from vLLM's source and not yet run: no GPU was at hand. The other engine tests run on CUDA as well where there is
one (tests/engine/engines.py starts the engine on it).
"""

import pytest
import torch

from engine import engines
from trl_fp8.engine.kv_cache import attention_layers
from trl_fp8.engine.upstream import engine_model


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WITH_AND_WITHOUT_GRAPHS = pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])


@pytest.mark.parametrize("linear_backend", ["cutlass", "triton"])
@WITH_AND_WITHOUT_GRAPHS
def test_two_syncs_equal_fresh_engines(linear_backend, enforce_eager, checkpoint, tmp_path):
    kwargs = {"linear_backend": linear_backend, "enforce_eager": enforce_eager}
    generation = engines.start(checkpoint("qwen3"), engine_kwargs=kwargs)
    results = []
    for step in (1, 2):
        engines.perturb(generation.model, seed=step)
        generation.calibrate = lambda step=step: engines.some_scales(2, step)
        generation.sync_weights()
        results.append(engines.log_probs(generation.llm))
    assert results[0] != results[1]
    engines.shutdown(generation.llm)
    fresh = engines.fresh(tmp_path / "fresh", generation, engines.some_scales(2, 2))
    assert engines.log_probs(fresh) == results[1]
    engines.shutdown(fresh)


@WITH_AND_WITHOUT_GRAPHS
def test_scales_reach_the_kernel_also_under_captured_graphs(enforce_eager, checkpoint):
    scales = engines.some_scales(2, 1)
    generation = engines.start(checkpoint("qwen3"), engine_kwargs={"enforce_eager": enforce_eager})
    generation.calibrate = lambda: scales
    generation.sync_weights()
    layer = attention_layers(engine_model(generation.llm))[0]
    assert type(layer.impl).__name__ in ("FlashAttentionImpl", "TritonAttentionImpl")
    base = engines.log_probs(generation.llm)
    scales.values.div_(64)  # saturates
    generation.sync_weights()
    assert engines.log_probs(generation.llm) != base
    scales.values.mul_(64)
    generation.sync_weights()
    assert engines.log_probs(generation.llm) == base
    engines.shutdown(generation.llm)
