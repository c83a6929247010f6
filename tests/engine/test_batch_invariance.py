"""No kernel of the CPU engine gives a row other bits because of what else is in the batch."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from vllm import ir
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models import commandr
from vllm.v1.sample.sampler import Sampler

from testing.reference_experts import ReferenceExperts
from trl_fp8.engine.vllm.cpu import reference_linear as cpu_linear
from trl_fp8.engine.vllm.cpu.ops import PROVIDER, OneGroupRouter, register_cpu_ops
from trl_fp8.engine.vllm.cpu.reference_experts import ReferenceUnquantizedExperts
from trl_fp8.engine.vllm.platform import CPU_KERNELS
from trl_fp8.quantization.codec.blockwise import quantize_activation, quantize_weight
from trl_fp8.quantization.codec.e4m3 import E4M3, saturating_cast_
from trl_fp8.upstream.vllm import forget_choices


pytestmark = pytest.mark.engine

ROWS = 200
CONFIG = CPU_KERNELS.arguments()["compilation_config"]
SIZES = {"aligned": 1024, "ragged": 900}  # of the sums: FP32 orders them by what a vector holds


def random(*shape, seed=0, scale=1.0):
    """BF16 numbers over a dozen octaves: a sum of their products loses most of them in FP32."""
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.randint(-6, 6, shape, generator=generator).float().exp2()
    return (scale * octaves * torch.randn(shape, generator=generator)).bfloat16()


def batches(rows=ROWS, seed=0):
    """Cuts of `range(rows)`: one row at a time, one apart, and at random."""
    generator = torch.Generator().manual_seed(seed)
    random_cuts = [torch.randperm(rows - 1, generator=generator)[:pieces].add(1) for pieces in (2, 9, 30)]
    return [range(rows + 1), (0, 1, rows), (0, rows - 1, rows), *[(0, *sorted(c.tolist()), rows) for c in random_cuts]]


def require_invariant(kernel, *inputs):
    """`kernel(*rows of inputs)` is a function of each row: whole and in `batches`, as views or copies."""
    whole = kernel(*inputs)
    assert whole.float().isfinite().all() and whole.float().count_nonzero() > 0.5 * whole.numel()
    for number, cuts in enumerate(batches()):
        parts = []
        for start, stop in pairwise(cuts):
            rows = [one[start:stop] for one in inputs]
            parts.append(kernel(*([one.clone() for one in rows] if number % 2 else rows)))
        assert torch.equal(torch.cat(parts), whole), cuts


# ----------------------------------------------------------------------------------------------- sums over a dimension


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outputs", [1, 16, 3000], ids=["gate", "router", "head"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_an_unquantized_linear(size, outputs, bias):
    weight, added = random(outputs, size, seed=1), random(outputs, seed=2) if bias else None
    require_invariant(lambda x: cpu_linear.linear(x, weight, added), random(ROWS, size))


def test_a_linear_equals_the_sum_in_float64_however_its_weight_is_cut(monkeypatch):
    x, weight, bias = random(7, 900), random(300, 900, seed=1), random(300, seed=2)
    expected = (x.double() @ weight.double().T + bias.double()).float()
    for rows in (1, 7, 300, 10_000):
        monkeypatch.setattr(cpu_linear, "BLOCK_BYTES", 8 * 900 * rows)
        assert torch.equal(cpu_linear.linear(x, weight, bias), expected.bfloat16())
        assert torch.equal(cpu_linear.linear(x, weight, bias, torch.float32), expected)
    assert cpu_linear.linear(x.view(1, 7, 900), weight).shape == (1, 7, 300)


def test_an_fp8_block_linear(monkeypatch):
    kernel = object.__new__(cpu_linear.ReferenceFp8BlockKernel)
    kernel.weight_group_shape, kernel.config = (
        SimpleNamespace(row=128, col=128),
        SimpleNamespace(out_dtype=torch.bfloat16),
    )
    weight = quantize_weight(random(640, 1024, seed=1).float(), "fp32")

    def multiply(x):
        quantized = quantize_activation(x, "fp32")
        return kernel.apply_block_scaled_mm(quantized.qdata, weight.qdata, quantized.scale, weight.scale)

    x = random(ROWS, 1024)
    require_invariant(multiply, x)
    whole = multiply(x)
    monkeypatch.setattr(cpu_linear, "BLOCK_BYTES", 8 * 1024 * 128)
    assert torch.equal(multiply(x), whole)


def test_an_fp8_tensor_linear():
    kernel = object.__new__(cpu_linear.ReferenceFp8TensorKernel)
    codes, scale = saturating_cast_(random(640, 1024, seed=1).float()), torch.tensor(0.37)
    bias = random(640, seed=2)

    def multiply(x):
        scales = x.float().abs().amax(-1, keepdim=True) / 448
        operands = dict(A=(x.float() / scales).to(E4M3), B=codes.t(), As=scales, Bs=scale, bias=bias)
        return kernel.apply_scaled_mm(**operands, out_dtype=torch.bfloat16, output_shape=(len(x), 640))

    require_invariant(multiply, random(ROWS, 1024))


EXPERTS, PER_TOKEN, HIDDEN, INTERMEDIATE = 6, 2, 256, 384


def routed(experts, w1, w2, activation):
    options = {"activation": activation, "apply_router_weight_on_input": False, "expert_map": None}

    def apply(x, weights, ids):
        output = torch.empty_like(x)
        experts.apply(output, x, w1, w2, weights, ids, **options)
        return output

    return apply


def routes(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(ROWS, EXPERTS, generator=generator).topk(PER_TOKEN)


@pytest.mark.parametrize("activation", ["SILU", "GELU"])
def test_unquantized_experts(activation):
    experts = object.__new__(ReferenceUnquantizedExperts)
    experts.quant_config = SimpleNamespace(w1_bias=random(EXPERTS, 2 * INTERMEDIATE, seed=4), w2_bias=None)
    w1, w2 = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=1), random(EXPERTS, HIDDEN, INTERMEDIATE, seed=2)
    weights, ids = routes()
    require_invariant(routed(experts, w1, w2, MoEActivation[activation]), random(ROWS, HIDDEN), weights, ids)


@pytest.mark.parametrize("fused", [False, True])
def test_the_fp8_experts_of_tests(fused):
    experts = object.__new__(ReferenceExperts)
    experts.fused_activation = fused
    w1, w2 = (
        quantize_weight(random(EXPERTS, *shape, seed=seed).float(), "fp32")
        for seed, shape in enumerate([(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)])
    )
    experts.quant_config = SimpleNamespace(w1_scale=w1.scale, w2_scale=w2.scale)
    weights, ids = routes()
    require_invariant(
        routed(experts, w1.qdata, w2.qdata, MoEActivation.SILU), random(ROWS, HIDDEN, scale=0.05), weights, ids
    )


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("experts", [8, 60, 128])
def test_gate_weights_and_the_choice_of_experts(experts, renormalize):
    register_cpu_ops()
    logits = random(ROWS, experts).clamp(-8, 8)  # with ties
    for which in (0, 1):
        require_invariant(lambda x, which=which: cpu_router._softmax_topk(x, 4, renormalize)[which] + which, logits)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_gate_weights_of_groups_of_experts(scoring):
    register_cpu_ops()
    logits, bias = random(ROWS, 60).clamp(-8, 8).float(), random(60, seed=1).float()
    groups = dict(num_expert_group=5, scoring_func=scoring, e_score_correction_bias=bias)

    def route(x, **options):
        weights, ids = cpu_router._grouped_topk(x, **groups, **options)
        return torch.ones(len(x), 60).scatter_add(1, ids.long(), weights)

    every = dict(topk=60, topk_group=5, renormalize=False, routed_scaling_factor=2.0**20)
    require_invariant(lambda x: route(x, **every), logits)
    some = dict(topk=6, topk_group=2, renormalize=True, routed_scaling_factor=2.5)
    require_invariant(lambda x: route(x, **some), logits)
    scores = torch.sigmoid(logits.double()) if scoring == "sigmoid" else logits.double().softmax(-1)
    chosen = route(logits, **some) > 1
    assert (chosen.sum(1) == 6).all()
    expected = torch.where(chosen, 2.5 * scores / (scores * chosen).sum(1, keepdim=True), 0) + 1
    torch.testing.assert_close(route(logits, **some).double(), expected, rtol=2**-20, atol=0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_bias_of_experts_without_groups_decides_which_are_chosen(scoring):
    logits = random(ROWS, 8).float()
    bias = 2 * torch.arange(8.0)  # differs by more than all scores do: the last two experts are chosen
    router = OneGroupRouter(top_k=2, global_num_experts=8, scoring_func=scoring, e_score_correction_bias=bias)
    weights, ids = router._compute_routing(logits, logits, None)
    assert set(ids.flatten().tolist()) == {6, 7}
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, ids.long())
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True))


# ------------------------------------------------------------------------------------- functions of a row or a number


def forms(columns, heads=4):
    """Rows as they come: contiguous, part of a fused projection's output, and one row for each head."""
    fused = random(ROWS, 2 * columns + 24)
    return {
        "rows": random(ROWS, columns),
        "part": fused[:, 8 : 8 + columns],
        "heads": random(ROWS, heads * columns).view(ROWS, heads, columns),
        "part of heads": random(ROWS, 2 * heads * columns)[:, : heads * columns].unflatten(-1, (heads, columns)),
    }


@pytest.mark.parametrize("columns", [64, 100, 3000])
@pytest.mark.parametrize("form", ["rows", "part", "heads", "part of heads"])
def test_norms(form, columns):
    register_cpu_ops()
    x, weight = forms(columns)[form], random(columns, seed=1)
    norm, add_norm = (getattr(ir.ops, name).impls[PROVIDER].impl_fn for name in ("rms_norm", "fused_add_rms_norm"))
    for scaled in (weight, weight.float() + 1, None):  # Llama's, Gemma's
        require_invariant(lambda x, scaled=scaled: norm(x, scaled, 1e-6), x)
    require_invariant(lambda x, residual: add_norm(x, residual, weight, 1e-6)[0], x, x.flip(0))
    for cohere in (commandr.layer_norm_func, commandr.rms_norm_func):
        require_invariant(lambda x, cohere=cohere: cohere(x, weight, 1e-6), x)


@pytest.mark.parametrize("rows", [1, 7])
def test_cohere_norms_are_the_formulas(rows):
    register_cpu_ops()
    x, weight = random(rows, 384), random(384, seed=1)
    wide = x.double()
    squares = wide.square().mean(-1, keepdim=True)
    for norm, numbers in (
        (
            commandr.layer_norm_func,
            (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, False, keepdim=True) + 1e-6).sqrt(),
        ),
        (commandr.rms_norm_func, wide / (squares + 1e-6).sqrt()),
    ):
        assert torch.equal(norm(x, weight, 1e-6), (numbers.float() * weight.float()).bfloat16())


def activations():
    """The engine's modules, as a model gets them."""
    register_cpu_ops()
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(**CONFIG))):
        return {"silu": SiluAndMul(), "gelu": GeluAndMul(), "gelu_tanh": GeluAndMul("tanh")}


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("form", ["rows", "part", "heads"])
def test_activations(form, name):
    module = activations()[name]
    for columns in (100, 1026):
        require_invariant(module, forms(columns)[form])


def test_torch_operations_on_bf16_do_not_depend_on_the_place_in_a_vector():
    """All of them, inside a vector, at its end, and strided: what models do to logits, and activations."""
    register_cpu_ops()
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    modules = activations()
    engine_functions = [lambda x, module=modules[name]: module(torch.cat([x, x], -1)) for name in modules]
    for function in (torch.sigmoid, torch.tanh, *engine_functions):
        found = function(x)
        assert torch.equal(found, torch.cat([function(one) for one in x.split(3)]))
        assert torch.equal(found, function(torch.stack([x, x], 1)[:, 0]))


def test_rotary_embedding():
    forget_choices()
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(**CONFIG))):
        rotary = get_rope(64, 4096, dtype=torch.bfloat16)
    positions = torch.randint(0, 4096, (ROWS,), generator=torch.Generator().manual_seed(0))
    for form in ("rows", "part"):
        query, key = forms(256)[form], forms(128)[form]
        for which in (0, 1):
            require_invariant(
                lambda p, q, k, which=which: rotary(p, q.contiguous(), k.contiguous())[which],
                positions,
                query,
                key,
            )
    forget_choices()


@pytest.mark.parametrize("vocabulary", [64, 1000, 32003])
def test_log_probs(vocabulary):
    require_invariant(Sampler.compute_logprobs, random(ROWS, vocabulary).float())
