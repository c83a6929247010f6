"""The sync on CUDA: kernels, CUDA graphs and FlashAttention. Run with `pytest -m gpu`.

Written from vLLM's source and not yet run: no GPU was at hand. The other engine tests run on CUDA as well where there
is one (testing/engines.py starts the engine on it).
"""

import gc
import logging

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from testing import engines, tiny_models
from testing.rollouts import agreement, calls_of, flow_of, sample
from trl_fp8.engine.vllm.gemms import Gemm
from trl_fp8.engine.vllm.kv_scales import attention_layers
from trl_fp8.policy.attention.calibration import observe_sequences
from trl_fp8.policy.attention.hook import AttentionHook
from trl_fp8.policy.flow.flow import FP8Flow
from trl_fp8.policy.flow.precision_flow import PrecisionFlow
from trl_fp8.quantization.formats.blocks import BLOCKS
from trl_fp8.quantization.kv_scales import kv_scales_from_amax
from trl_fp8.upstream.vllm import engine_model


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WITH_AND_WITHOUT_GRAPHS = pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])


KERNELS = pytest.mark.parametrize("linear_backend", ["cutlass", "deep_gemm", "triton"])


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
    assert chosen in ("cutlass", "deep_gemm", "triton")
    assert any(chosen.replace("_", "") in name.lower() for name in generation.numerics.kernels)
    alone = "triton" == chosen and torch.cuda.get_device_capability() == (8, 9)
    assert alone or f"FP8 linears run on {chosen!r}" in caplog.text
    engines.shutdown(generation.llm)


@KERNELS
@WITH_AND_WITHOUT_GRAPHS
def test_two_syncs_equal_fresh_engines(linear_backend, enforce_eager, checkpoint, tmp_path):
    require_offered(linear_backend)
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
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 2)) == results[1]


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


def require_lower(followed: float, plain: float, share: float) -> None:
    """The mismatch that is left is at most `share` of what it was; more is expected, and said with its number.

    vLLM 0.31's CUDA kernels of norms and rotary embeddings round once where the flow rounds twice (read in their
    machine code), and its GEMMs add in another order. Played on CPU with random models, a flow that differs in norms
    and rotary embeddings only leaves 72 % of the mismatch at 2 layers and 77 % at 36; in the order of FP32 sums only,
    31 % and 57 %.
    """
    assert followed < plain, f"the flow adds mismatch: {followed:.3g} instead of {plain:.3g}"
    if followed >= share * plain:
        pytest.xfail(
            f"{followed / plain:.2f} of the mismatch is left, wanted {share}, expected 0.75: kernels round elsewhere"
        )


@WITH_AND_WITHOUT_GRAPHS
def test_the_precision_flow_lowers_the_mismatch(enforce_eager, checkpoint):
    """Attention rounds its softmax weights to FP8 inside the kernel, which the trainer does not: less, not nothing."""
    generation = engines.start(
        checkpoint("qwen3"), engine_kwargs={"enforce_eager": enforce_eager}, match_rounding=True
    )
    hook = AttentionHook(generation.model)
    scales = kv_scales_from_amax(observe_sequences(generation.model, hook, engines.PROMPTS).amax_L3)
    generation.calibrate = lambda: scales
    generation.sync_weights()
    assert generation.numerics.query_rounded
    rollouts = engines.log_probs(generation.llm)
    plain = distance(generation.model, rollouts)
    hook.simulate(scales.values.cuda())
    hook.round_queries(True)
    PrecisionFlow(generation.model, generation.recipe, FP8Flow(activation=generation.numerics.linears), hook)
    engines.shutdown(generation.llm)
    require_lower(distance(generation.model, rollouts), plain, 0.7)


@pytest.mark.parametrize("attention_backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_simulated_attention_weights_lower_the_mismatch_further(attention_backend, checkpoint):
    """The kernels' tiles are not known, so that some is left."""
    generation = engines.start(
        checkpoint("qwen3"), engine_kwargs={"attention_backend": attention_backend}, match_rounding=True
    )
    hook = AttentionHook(generation.model)
    scales = kv_scales_from_amax(observe_sequences(generation.model, hook, engines.PROMPTS).amax_L3)
    generation.calibrate = lambda: scales
    generation.sync_weights()
    rollouts = engines.log_probs(generation.llm)
    hook.simulate(scales.values.cuda())
    hook.round_queries(True)
    PrecisionFlow(generation.model, generation.recipe, FP8Flow(activation=generation.numerics.linears), hook)
    without = distance(generation.model, rollouts)
    hook.follow(True, generation.numerics.attention_weight_offset)
    engines.shutdown(generation.llm)
    require_lower(distance(generation.model, rollouts), without, 0.8)


@torch.no_grad()
def distance(model, rollouts):
    """Mean |trainer - engine| log-prob over the prompts' tokens."""
    total, count = 0.0, 0
    for ids, (_, _, engines_own) in zip(engines.PROMPTS, rollouts, strict=True):
        tokens = torch.tensor([ids], device="cuda")
        logps = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0, :-1].float().log_softmax(-1)
        ours = logps.gather(-1, tokens[0, 1:, None])[:, 0]
        total += (ours - torch.tensor(engines_own, device="cuda")).abs().sum().item()
        count += len(engines_own)
    return total / count


def test_the_trainers_fp8_linear_gives_the_engines_outputs(checkpoint):
    """The same input, whose GEMM adds up in another order:
    off by at most two BF16 steps of its row's largest output.
    """
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1))
    generation.sync_weights()
    names = {"model.layers.0.self_attn.qkv_proj": "q_proj k_proj v_proj", "model.layers.1.mlp.down_proj": "down_proj"}
    calls = {name: calls_of(generation, name) for name in names}
    PrecisionFlow(generation.model, generation.recipe, flow_of(generation), None)
    for name, parts in names.items():
        parent = generation.model.get_submodule(name.rpartition(".")[0])
        for x, y in calls[name]:
            with torch.no_grad():
                ours = torch.cat([getattr(parent, part)(x) for part in parts.split()], -1).float()
            largest = y.float().abs().amax(-1, keepdim=True)
            assert ((ours - y.float()).abs() <= 2 * 2**-8 * largest).all(), name
    engines.shutdown(generation.llm)


def test_skipped_kv_layers_keep_a_bf16_cache(checkpoint, tmp_path):
    scales = engines.some_scales(2, 1)
    generation = engines.start(checkpoint("qwen3"), scales, kv_cache_skip_layers=(0,))
    generation.sync_weights()
    synced = engines.log_probs(generation.llm)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, scales) == synced


@WITH_AND_WITHOUT_GRAPHS
def test_an_engine_that_slept_samples_as_before(enforce_eager, checkpoint):
    generation = engines.start(
        checkpoint("qwen3"), engines.some_scales(2, 1), engine_kwargs={"enforce_eager": enforce_eager}, sleep=True
    )
    generation.temperature = 0.0
    generation.sync_weights()
    generation.llm.keep_weights = True  # level 1: weights in host memory
    first, sync = generation.generate(engines.PROMPTS, None, 1), generation.last_sync
    assert generation.llm.weights_kept
    assert generation.generate(engines.PROMPTS, None, 1) == first and generation.last_sync is sync
    generation.llm.keep_weights = False  # level 2: weights discarded
    assert generation.generate(engines.PROMPTS, None, 1) == first and generation.last_sync is sync
    assert not generation.llm.weights_kept
    assert generation.generate(engines.PROMPTS, None, 1) == first and generation.last_sync is not sync
    generation.llm.wake_up()
    engines.shutdown(generation.llm)
    # vLLM's allocator serves one engine of a process at a time: its memory must be back before the next one sleeps
    del generation
    gc.collect()
    torch.cuda.empty_cache()


@WITH_AND_WITHOUT_GRAPHS
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_two_syncs_of_fp8_experts_equal_fresh_engines(architecture, enforce_eager, checkpoint, tmp_path):
    generation = engines.start(checkpoint(architecture), engine_kwargs={"enforce_eager": enforce_eager})
    generation.calibrate = lambda: engines.some_scales(2, 1)
    assert generation.recipe.fp8_experts and generation.numerics.kernels["Fp8MoeBackend.TRITON"] == 2
    synced = engines.after_two_syncs(generation)
    engines.require_whole_audit(generation)
    engines.shutdown(generation.llm)
    assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 1)) == synced


@WITH_AND_WITHOUT_GRAPHS
def test_vllm_returns_the_experts_of_every_token(enforce_eager, checkpoint):
    """Its own routes (`enable_return_routed_experts`), from prefix cache and graphs alike;
    without FP8 they are ours.
    """
    options = {"fp8_weights": False, "kv_cache_dtype": "auto", "return_routes": True}
    folder = checkpoint("qwen3_moe", num_experts=8)
    generation = engines.start(folder, engine_kwargs={"enforce_eager": enforce_eager}, **options)
    generation.sync_weights()
    sequences = sample(generation)
    found = generation.llm.routes.of(sequences)
    assert [rows.shape for rows in found] == [(len(tokens) - 1, 2, 2) for tokens in sequences]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert agreement(model, sequences, found) > 0.9
    assert agreement(model, sequences, found, shift=1) < 0.5
    engines.shutdown(generation.llm)


@WITH_AND_WITHOUT_GRAPHS
def test_the_precision_flow_lowers_the_mismatch_of_experts(enforce_eager, checkpoint):
    kwargs = {"enforce_eager": enforce_eager}
    generation = engines.start(checkpoint("qwen3_moe", num_experts=8), engine_kwargs=kwargs, match_rounding=True)
    hook = AttentionHook(generation.model)
    scales = kv_scales_from_amax(observe_sequences(generation.model, hook, engines.PROMPTS).amax_L3)
    generation.calibrate = lambda: scales
    generation.sync_weights()
    rollouts = engines.log_probs(generation.llm)
    plain = distance(generation.model, rollouts)
    hook.simulate(scales.values.cuda())
    hook.round_queries(True)
    scaling, fused = generation.numerics.experts, generation.numerics.fused_experts
    experts_flow = FP8Flow(activation=scaling, fused_activation=fused)
    PrecisionFlow(
        generation.model, generation.recipe, FP8Flow(activation=generation.numerics.linears), hook, experts_flow
    )
    engines.shutdown(generation.llm)
    require_lower(distance(generation.model, rollouts), plain, 0.7)
