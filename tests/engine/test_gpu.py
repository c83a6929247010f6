"""The sync on CUDA: kernels, CUDA graphs and FlashAttention. Run with `pytest -m gpu`.

Written from vLLM's source and not yet run: no GPU was at hand. The other engine tests run on CUDA as well where there
is one (testing/engines.py starts the engine on it).
"""

import gc
import logging

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from testing import engines, tiny_models
from testing.rollouts import agreement, sample
from trl_fp8.engine.vllm.gemms import Gemm
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.features.router_replay.engine_routes import RouteLog
from trl_fp8.quantization.formats import BLOCKS
from trl_fp8.upstream.vllm import engine_model


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LORA = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
# With the compiler and CUDA graphs, as in training. The compiler tries how to reduce on the device, and engines with
# caches of their own could take other orders of a sum
COMPILED = {
    "enforce_eager": False,
    "compilation_config": {"inductor_compile_config": {"deterministic": True}},
}
KERNELS = pytest.mark.parametrize("linear_backend", ["cutlass", "deep_gemm", "flashinfer_cutlass", "triton"])


def require_offered(linear_backend, scale_format="pow2"):
    """The check passes, or the kernel is not for this GPU, as DeepGEMM is not for Ada and, packing, for Blackwell."""
    device, capability = torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_capability()
    gemm = Gemm(linear_backend, BLOCKS, scale_format, device, tiny_models.config())
    try:
        gemm.check()
    except ValueError as reason:
        assert linear_backend != "triton"
        assert linear_backend != "deep_gemm" or capability[0] < 10 or "int32" in str(reason)
        pytest.skip(str(reason))
    return gemm


@KERNELS
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_kernels_pass_the_check_and_can_be_timed(linear_backend, scale_format):
    gemm = require_offered(linear_backend, scale_format)
    few, many = (gemm.seconds((4096, 4096), rows) for rows in (64, 4096))
    assert 1e-6 < few < many < 0.1


def test_the_fastest_kernel_is_pinned_and_said(checkpoint, caplog):
    PartialState()
    with caplog.at_level(logging.INFO, logger="trl_fp8"):
        generation = engines.start(checkpoint("qwen3"))
    chosen = generation.pinned["linear_backend"]
    assert chosen in ("cutlass", "deep_gemm", "flashinfer_cutlass", "triton")
    assert any(
        chosen.partition("_cutlass")[0].replace("_", "") in name.lower() for name in generation.numerics.kernels
    )
    alone = "triton" == chosen and torch.cuda.get_device_capability() == (8, 9)
    assert alone or f"FP8 linears run on {chosen!r}" in caplog.text
    engines.shutdown(generation.llm)


@KERNELS
def test_two_syncs_equal_fresh_engines(linear_backend, checkpoint, tmp_path):
    require_offered(linear_backend)
    generation = engines.start(checkpoint("qwen3"), engine_kwargs={"linear_backend": linear_backend} | COMPILED)
    results = []
    for step in (1, 2):
        engines.perturb(generation.model, seed=step)
        engines.scales_of(generation).calibrate = lambda step=step: engines.some_scales(2, step)
        generation.sync_weights()
        results.append(engines.log_probs(generation.llm))
    assert results[0] != results[1]
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 2)) == results[1]


def test_scales_reach_the_kernel_under_captured_graphs(checkpoint):
    scales = engines.some_scales(2, 1)
    generation = engines.start(checkpoint("qwen3"), engine_kwargs=COMPILED)
    engines.scales_of(generation).calibrate = lambda: scales
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


def test_skipped_kv_layers_keep_a_bf16_cache(checkpoint, tmp_path):
    scales = engines.some_scales(2, 1)
    generation = engines.start(checkpoint("qwen3"), scales, engine_kwargs=COMPILED, kv_cache_skip_layers=(0,))
    generation.sync_weights()
    synced = engines.log_probs(generation.llm)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, scales) == synced


def test_an_engine_that_slept_samples_as_before(checkpoint):
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1), engine_kwargs=COMPILED, sleep=True)
    generation.temperature = 0.0
    generation.sync_weights()
    generation.llm.keep_weights = True  # level 1: weights in host memory
    first, sync = generation.generate(engines.PROMPTS, None, 1), generation.last_sync
    assert generation.llm.asleep_with_weights
    assert generation.generate(engines.PROMPTS, None, 1) == first and generation.last_sync is sync
    generation.llm.keep_weights = False  # level 2: weights discarded
    assert generation.generate(engines.PROMPTS, None, 1) == first and generation.last_sync is sync
    assert not generation.llm.asleep_with_weights
    assert generation.generate(engines.PROMPTS, None, 1) == first and generation.last_sync is not sync
    generation.llm.wake_up()
    engines.shutdown(generation.llm)
    # vLLM's allocator serves one engine of a process at a time: its memory must be back before the next one sleeps
    del generation
    gc.collect()
    torch.cuda.empty_cache()


def test_adapters_reach_the_kernels_under_captured_graphs(checkpoint):
    lora = LoraConfig(r=4, **LORA)
    options = {"kv_scales": engines.some_scales(2, 1), "engine_kwargs": COMPILED}
    generation = engines.start_on_base(checkpoint("qwen3"), lora, **options)
    adapters = {name: p.detach().clone() for name, p in generation.model.named_parameters() if p.requires_grad}
    found = []
    for scale in (1, -1, 1):
        for name, adapter in adapters.items():
            generation.model.get_parameter(name).data.copy_(adapter * (scale if "lora_B" in name else 1))
        generation.sync_weights()
        generation.delivery.verify()
        found.append(engines.log_probs(generation.llm))
    engines.shutdown(generation.llm)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("rank", [None, 4, 8])
def test_a_compiled_engine_computes_what_an_eager_one_does_with_any_adapters(rank, checkpoint):
    """Bit for bit under one forward. vLLM's compile cache is one for all three, as on a user's machine."""
    options, found = {"kv_scales": engines.some_scales(2, 1), "parts": [SharedKernelsPart()]}, []
    for kwargs in (COMPILED, {"enforce_eager": True}):
        if rank is None:
            generation = engines.start(checkpoint("qwen3"), engine_kwargs=kwargs, **options)
        else:
            torch.manual_seed(rank)  # of B, too
            lora = LoraConfig(r=rank, **LORA)
            generation = engines.start_on_base(checkpoint("qwen3"), lora, engine_kwargs=kwargs, **options)
        generation.sync_weights()
        found.append(engines.log_probs(generation.llm))
        engines.shutdown(generation.llm)
    assert found[0] == found[1]


def test_an_engine_with_a_shared_base_sleeps_and_samples_again(checkpoint):
    """Its weights stay while it sleeps: the policy computes with them."""
    lora = LoraConfig(r=4, **LORA)
    options = {"kv_scales": engines.some_scales(2, 1), "engine_kwargs": COMPILED, "sleep": True}
    generation = engines.start_on_base(checkpoint("qwen3"), lora, **options)
    generation.temperature = 0.0
    generation.sync_weights()
    first = generation.generate(engines.PROMPTS, None, 1)  # and falls asleep
    generation.sync_weights()
    assert generation.generate(engines.PROMPTS, None, 1) == first
    generation.llm.wake_up()
    engines.shutdown(generation.llm)
    del generation  # as after the last one that slept
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_two_syncs_of_fp8_experts_equal_fresh_engines(architecture, checkpoint, tmp_path):
    generation = engines.start(checkpoint(architecture), engine_kwargs=COMPILED)
    engines.scales_of(generation).calibrate = lambda: engines.some_scales(2, 1)
    assert generation.recipe.fp8_experts and generation.numerics.kernels["Fp8MoeBackend.TRITON"] == 2
    synced = engines.after_two_syncs(generation)
    engines.require_whole_audit(generation)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 1)) == synced


def test_vllm_returns_the_experts_of_every_token(checkpoint):
    """Its own routes (`enable_return_routed_experts`), from prefix cache and graphs alike;
    without FP8 they are ours.
    """
    options = {"fp8_weights": False, "kv_cache_dtype": "auto", "parts": [RouteLog()]}
    folder = checkpoint("qwen3_moe", num_experts=8)
    generation = engines.start(folder, engine_kwargs=COMPILED, **options)
    generation.sync_weights()
    sequences = sample(generation)
    found = engines.part_of(generation, RouteLog).notes_on(sequences)
    assert [rows.shape for rows in found] == [(len(tokens) - 1, 2, 2) for tokens in sequences]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert agreement(model, sequences, found) > 0.9
    assert agreement(model, sequences, found, shift=1) < 0.5
    engines.shutdown(generation.llm)
