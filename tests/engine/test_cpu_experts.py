"""The reference for unquantized experts against a loop over tokens, and what it leaves as it was loaded."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from trl_fp8.engine.vllm.cpu.reference_experts import ReferenceUnquantizedExperts, register_cpu_experts


TOKENS, PER_TOKEN, EXPERTS, INTERMEDIATE, HIDDEN = 9, 2, 5, 96, 64


def experts(w1_bias=None, w2_bias=None):
    made = object.__new__(ReferenceUnquantizedExperts)
    made.quant_config = SimpleNamespace(w1_bias=w1_bias, w2_bias=w2_bias)
    return made


def loop(x, w1, w2, weights, ids, activation, w1_bias, w2_bias):
    """In float64, rounded to BF16 where a GPU stores BF16: gate, up, each factor, weighted products, the sum."""

    def bf16(values):
        return values.float().bfloat16().double()

    rows = []
    for token in range(len(x)):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate_up = w1[expert].double() @ x[token].double() + w1_bias[expert].double()
            gate, up = bf16(gate_up).chunk(2)
            hidden = bf16(bf16(activation(gate)) * up)
            total += bf16((w2[expert].double() @ hidden + w2_bias[expert].double()) * weight)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name, activation", [("SILU", F.silu), ("GELU", F.gelu)])
def test_the_reference_is_the_loop(name, activation, with_bias):
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).bfloat16()

    x, w1 = random(TOKENS, HIDDEN), random(EXPERTS, 2 * INTERMEDIATE, HIDDEN, scale=0.2)
    w2 = random(EXPERTS, HIDDEN, INTERMEDIATE, scale=0.2)
    biases = [random(EXPERTS, size) for size in (2 * INTERMEDIATE, HIDDEN)]
    ids = torch.rand(TOKENS, EXPERTS - 1, generator=generator).topk(PER_TOKEN)[1].int()  # the last one gets no token
    weights = torch.rand(TOKENS, PER_TOKEN, generator=generator)
    output = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    made = experts(*biases) if with_bias else experts()
    options = {"activation": MoEActivation[name], "apply_router_weight_on_input": False, "expert_map": None}
    made.apply(output, x, w1, w2, weights, ids, **options)
    expected = loop(x, w1, w2, weights, ids, activation, *(biases if with_bias else [b * 0 for b in biases]))
    assert torch.equal(output, expected.float().bfloat16())


def test_unsupported_experts_are_refused():
    assert not ReferenceUnquantizedExperts._supports_activation(MoEActivation.SWIGLUSTEP)
    with pytest.raises(NotImplementedError, match="not what goes in"):
        options = {"activation": MoEActivation.SILU, "apply_router_weight_on_input": True}
        experts().apply(*[torch.empty(1, 1)] * 6, **options)


def test_reference_experts_come_first_on_cpu_and_nowhere_else():
    register_cpu_experts()
    register_cpu_experts()
    classes = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
    assert classes[0] is ReferenceUnquantizedExperts and classes.count(ReferenceUnquantizedExperts) == 1
    triton = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.TRITON)
    assert ReferenceUnquantizedExperts not in triton
