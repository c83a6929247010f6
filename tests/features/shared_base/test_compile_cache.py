"""Compiled engines that share one cache of vLLM's: none runs what was compiled for another."""

import os
import shutil

import pytest
import torch
from peft import LoraConfig
from vllm import envs
from vllm.compilation.counter import compilation_counter

from testing import engines
from trl_fp8.engine.vllm.platform import compile_cache_key
from trl_fp8.features.shared_base import engine_base
from trl_fp8.upstream.vllm import engine_model


pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"),
]
# Inductor calls torch's own kernels, so that there is hardly anything to build
COMPILED = {"enforce_eager": False, "compilation_config": {"inductor_compile_config": {"fallback_by_default": True}}}
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj"]


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """A checkpoint for which one engine, without adapters, has filled a cache that was empty."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        load = torch.compiler.load_compiled_function

        def loaded(*args, **kwargs):
            """vLLM loads what its backend for GPUs compiled. On CPU it takes Inductor, whose code has no such hook."""
            function = load(*args, **kwargs)
            function._artifacts.compiled_fn.finalize_loading = lambda config: None
            return function

        patch.setattr(torch.compiler, "load_compiled_function", loaded)
        envs.disable_envs_cache()  # an engine before had vLLM keep what they were
        made = checkpoint("qwen3", num_hidden_layers=1)
        assert compared(made, rank=0) == 0
        yield made
    envs.disable_envs_cache()


def started(folder, rank):
    options = {"kv_scales": engines.some_scales(1, 1), "engine_kwargs": COMPILED}
    if rank == 0:
        return engines.start(folder, **options)
    torch.manual_seed(rank)
    lora = LoraConfig(r=rank, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
    return engines.start_on_base(folder, lora, **options)


def compared(folder, rank) -> int:
    """How many models an engine loaded from the cache, whose log-probs are those of its modules, uncompiled."""
    before = compilation_counter.num_aot_artifacts_loaded
    generation = started(folder, rank)
    generation.sync_weights()
    generation.delivery.verify()  # what was tried with adapters is gone
    compiled = engines.log_probs(generation.llm)
    engine_model(generation.llm).model.do_not_compile = True
    generation.engine.reset_prefix_cache()
    assert engines.log_probs(generation.llm) == compiled
    engines.shutdown(generation.llm)
    return compilation_counter.num_aot_artifacts_loaded - before


def test_an_engine_runs_what_was_compiled_for_it(folder):
    assert [compared(folder, rank) for rank in (4, 8, 0)] == [0, 0, 1]


def test_code_of_an_engine_without_adapters_is_found_out_before_the_first_rollout(folder, monkeypatch):
    # As if adapters were not hashed
    monkeypatch.setattr(engine_base, "compile_cache_key", lambda adapters: compile_cache_key())
    before = compilation_counter.num_aot_artifacts_loaded
    generation = started(folder, rank=4)
    assert compilation_counter.num_aot_artifacts_loaded == before + 1
    with pytest.raises(RuntimeError, match=r"(?s)layers.0.self_attn.qkv_proj, .*gate_up_proj.*VLLM_DISABLE_COMPILE"):
        generation.sync_weights()
    engines.shutdown(generation.llm)
