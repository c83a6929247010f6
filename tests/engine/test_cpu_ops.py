"""Norm and rotary embedding of a CPU engine against independent formulas and transformers' BF16 arithmetic."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from vllm import SamplingParams, ir
from vllm.model_executor.layers.fused_moe.router import cpu_router

from testing import engines
from trl_fp8.engine.vllm.cpu.ops import PROVIDER, register_cpu_ops
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

EPSILON = 1e-6


def states(rows=64, columns=384, seed=0):
    """x, residual and norm weight in BF16; sums of the first two often fall between two BF16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, columns, generator=generator).to(torch.bfloat16) for _ in range(2))
    return x, residual * 3, (1 + 0.2 * torch.randn(columns, generator=generator)).to(torch.bfloat16)


def add_norm(x, residual, weight):
    """In float64, rounded where a BF16 model rounds: the sum, the normalized value, its product with the weight."""
    total = (x.double() + residual.double()).to(torch.bfloat16)
    wide = total.double()
    normalized = (wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()).to(torch.bfloat16)
    return (normalized.double() * weight.double()).to(torch.bfloat16), total


def ours():
    register_cpu_ops()
    return ir.ops.fused_add_rms_norm.impls[PROVIDER].impl_fn


@pytest.mark.parametrize("rows, columns", [(64, 384), (1, 128), (7, 100)])
def test_the_norm_normalizes_the_rounded_sum(rows, columns):
    x, residual, weight = states(rows, columns)
    found, total = ours()(x.clone(), residual.clone(), weight, EPSILON)
    expected, expected_total = add_norm(x, residual, weight)
    norm = Qwen3RMSNorm(columns, EPSILON)
    norm.weight.data = weight
    assert found.dtype == total.dtype == torch.bfloat16
    assert torch.equal(total, expected_total)
    assert torch.equal(found, expected)
    # float64 and FP32 round a value to different BF16 numbers only if it lies within FP32's error of a tie
    assert (found != norm(x + residual)).sum() <= 1 + found.numel() // 1000
    native, native_total = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPSILON)
    assert torch.equal(native_total, total)
    assert (native != found).float().mean() > 0.05  # vLLM's torch path normalizes the FP32 sum


def test_torch_casts_fp64_to_bf16_by_way_of_fp32():
    """The reference kernels leave it to torch: 1 + 2^-8 + 2^-30 is above a tie in FP64, and the tie itself in FP32."""
    beside_ties = torch.tensor([1 + 2**-8 + 2**-30, 1 + 2**-8, 1 + 3 * 2**-8 - 2**-30], dtype=torch.float64)
    rounded = beside_ties.to(torch.bfloat16)
    assert rounded.tolist() == [1, 1, 1 + 2**-6]
    assert torch.equal(torch.empty(3, dtype=torch.bfloat16).copy_(beside_ties), rounded)
    assert torch.equal(beside_ties.float().to(torch.bfloat16), rounded)


@pytest.mark.parametrize("renormalize", [True, False])
def test_gate_weights_are_fp32_numbers_of_bf16_logits(renormalize):
    register_cpu_ops()
    register_cpu_ops()
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weights, experts = cpu_router._softmax_topk(logits, 2, renormalize)
    expected = logits.double().softmax(-1).gather(-1, experts.long())
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=0)
    native, chosen = cpu_router._softmax_topk.args[0](logits, 2, renormalize)
    assert torch.equal(chosen, experts)
    assert (native.double() / expected - 1).abs().max() > 2**-10  # vLLM's own: BF16 numbers


def test_registering_again_is_harmless():
    register_cpu_ops()
    before = dict(ir.ops.fused_add_rms_norm.impls)
    register_cpu_ops()
    assert dict(ir.ops.fused_add_rms_norm.impls) == before and PROVIDER in before


def calls_of(modules, run):
    """Per module, the inputs and outputs of its calls during `run()`. An engine's operators may write in place."""
    inputs, outputs = {name: [] for name in modules}, {name: [] for name in modules}

    def entering(name, args, kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        inputs[name].append([tensor.clone() for tensor in tensors])

    def leaving(name, output):
        outputs[name].append([tensor.clone() for tensor in (output if isinstance(output, tuple) else (output,))])

    hooks = []
    for name, module in modules.items():
        before = lambda module, args, kwargs, name=name: entering(name, args, kwargs)  # noqa: E731
        after = lambda module, args, output, name=name: leaving(name, output)  # noqa: E731
        hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    run()
    for hook in hooks:
        hook.remove()
    return {name: list(zip(inputs[name], outputs[name], strict=True)) for name in modules}


def cos_sin(model, positions):
    """transformers' tables for the policy: FP32 angles, handed on in BF16."""
    rotary = model.model.rotary_emb
    like = torch.zeros(1, dtype=torch.bfloat16)
    return rotary(like, positions[None])


def test_a_started_engine_computes_transformers_norms_and_rotary_embedding(checkpoint):
    generation = engines.start(checkpoint("qwen3"), None, kv_cache_dtype="auto")
    engines.perturb(generation.model, 1)  # norm weights that are not 1
    generation.sync_weights()
    layer = engine_model(generation.llm).model.layers[1]
    attention = layer.self_attn
    modules = {
        "norm": layer.post_attention_layernorm,
        "rotary": attention.rotary_emb,
        "q_norm": attention.q_norm,
    }
    prompts = [{"prompt_token_ids": ids} for ids in engines.PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    calls = calls_of(modules, lambda: generation.llm.generate(prompts, greedy, use_tqdm=False))
    # a prefill and three decode steps; the layers share one rotary embedding
    assert [len(found) for found in calls.values()] == [4, 8, 4]

    policy = generation.model.model.layers[1]
    norm = Qwen3RMSNorm(128, EPSILON)
    norm.weight.data = policy.post_attention_layernorm.weight.data.to(torch.bfloat16)
    off = 0
    for (x, residual), (normalized, total) in calls["norm"]:
        assert torch.equal(total, x + residual)
        assert torch.equal(normalized, norm(x + residual))
        native = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, norm.weight.data, EPSILON)[0]
        off += (native != normalized).sum().item()
    assert off > 0
    q_norm = Qwen3RMSNorm(64, EPSILON)
    q_norm.weight.data = policy.self_attn.q_norm.weight.data.to(torch.bfloat16)
    assert all(torch.equal(found, q_norm(x)) for (x,), (found,) in calls["q_norm"])
    for (positions, query, key), (turned_q, turned_k) in calls["rotary"]:
        cos, sin = cos_sin(generation.model, positions)
        heads = [states.view(len(positions), -1, 64).transpose(0, 1)[None] for states in (query, key)]
        expected = apply_rotary_pos_emb(*heads, cos, sin)
        for found, states in zip((turned_q, turned_k), expected, strict=True):
            assert torch.equal(found, states[0].transpose(0, 1).reshape(found.shape))
        # vLLM's kernel for AVX2 computes in FP32 and drops the lower 16 bits
        wide = apply_rotary_pos_emb(*(states.float() for states in heads), cos.float(), sin.float())[0]
        towards_zero = (wide.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        assert (towards_zero[0].transpose(0, 1).reshape(turned_q.shape) != turned_q).float().mean() > 0.2
    engines.shutdown(generation.llm)
