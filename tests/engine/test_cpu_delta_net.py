"""The reference for gated delta nets of a CPU engine, against transformers' recurrence in FP64, and bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from trl_fp8.engine.vllm.cpu.delta_net import delta_net, register_cpu_delta_net


KEYS, VALUES, K, V, C = 2, 4, 16, 8, 4  # heads and sizes of k and v, kernel
CHANNELS = 2 * KEYS * K + VALUES * V


def layer(slots: int = 5) -> nn.Module:
    """What the operation asks of a layer; its cache holds another request's state everywhere."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return SimpleNamespace(
        conv1d=SimpleNamespace(weight=normal(CHANNELS, 1, C).bfloat16()),
        A_log=normal(VALUES),
        dt_bias=normal(VALUES).bfloat16(),
        key_dim=KEYS * K,
        head_k_dim=K,
        head_v_dim=V,
        tp_size=1,
        kv_cache=(normal(slots, C - 1, CHANNELS).bfloat16(), normal(slots, VALUES, V, K)),
    )


def inputs(tokens: int) -> list[torch.Tensor]:
    """mixed_qkv, b and a."""
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, size, generator=generator).bfloat16() for size in (CHANNELS, VALUES, VALUES)]


def run(net: nn.Module, parts: list[list[torch.Tensor]], slots: list[int], fresh: list[bool], decodes: int = 0):
    """Outputs of several requests in one call, those that decode first."""
    bounds = torch.tensor([0, *torch.tensor([len(part[0]) for part in parts]).cumsum(0).tolist()], dtype=torch.int32)
    metadata = SimpleNamespace(
        num_decodes=decodes,
        num_prefills=len(parts) - decodes,
        non_spec_query_start_loc=bounds,
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
        has_initial_state=~torch.tensor(fresh) if decodes < len(parts) else None,
    )
    out = torch.zeros(int(bounds[-1]), VALUES, V, dtype=torch.bfloat16)
    delta_net(net, metadata, *(torch.cat(each) for each in zip(*parts, strict=True)), out)
    return out.split(bounds.diff().tolist())


def test_the_delta_net_is_the_recurrence_of_transformers():
    net, (mixed, b, a) = layer(), inputs(23)
    [out] = run(net, [[mixed, b, a]], [2], [True])
    padded = functional.pad(mixed.double().T, (C - 1, 0))
    x = functional.silu(functional.conv1d(padded, net.conv1d.weight.double(), groups=CHANNELS)).T.bfloat16().double()
    q, k, v = (
        part.unflatten(-1, (-1, size))
        for part, size in zip(x.split([KEYS * K] * 2 + [VALUES * V], -1), (K, K, V), strict=True)
    )
    q, k = (each.repeat_interleave(VALUES // KEYS, 1) for each in (q, k))
    decay = -net.A_log.double().exp() * functional.softplus(a.double() + net.dt_bias.double())
    states = [each[None].double() for each in (q, k, v, decay, b.double().sigmoid())]
    expected, last = torch_recurrent_gated_delta_rule(*states, None, True, use_qk_l2norm_in_kernel=True)
    # it computes in FP32: 23 steps of a state's relative error 2**-24, each number rounded to BF16's 8 bits in the end
    assert (out - expected[0]).abs().max() <= 2**-8 * expected.abs().max()
    held = net.kv_cache[1].view(-1, VALUES, K, V)[2]
    assert (held - last[0]).abs().max() <= 23 * 2**-22 * last.abs().max()
    assert torch.equal(net.kv_cache[0][2], mixed[-(C - 1) :])


def test_decode_steps_and_chunks_give_what_one_prefill_gives_whatever_else_is_in_the_batch():
    parts = inputs(17)
    alone = layer()
    [expected] = run(alone, [parts], [1], [True])
    net = layer()
    others = [inputs(6), inputs(1)]
    chunk = [each[:9] for each in parts]
    decoding, found, _ = run(net, [others[1], chunk, others[0]], [3, 1, 0], [False, True, True], decodes=1)
    steps = [found]
    for token in range(9, 17):
        step, *_ = run(net, [[each[token : token + 1] for each in parts], others[1]], [1, 3], [False] * 2, decodes=2)
        steps.append(step)
    assert torch.equal(torch.cat(steps), expected)
    for ours, theirs in zip(net.kv_cache, alone.kv_cache, strict=True):
        assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[4], theirs[4])  # nobody's stays as it was
    assert not torch.equal(decoding, run(layer(), [others[1]], [3], [True])[0])  # it had a state


def test_an_engine_calls_the_reference_delta_net(monkeypatch):
    monkeypatch.setattr(gdn_attention, "_cpu_gdn_attention_nonspec", gdn_attention._cpu_gdn_attention_nonspec)
    register_cpu_delta_net()
    assert gdn_attention._cpu_gdn_attention_nonspec is delta_net
    seen, net = [], layer()
    monkeypatch.setattr(gdn_attention, "_cpu_gdn_attention_nonspec", lambda *args: seen.append(args))
    monkeypatch.setattr(gdn_attention, "_resolve_layer_name", lambda name: name)
    metadata = object.__new__(gdn_attention.GDNAttentionMetadata)
    metadata.num_actual_tokens, net.prefix = 1, "n"
    context = SimpleNamespace(no_compile_layers={"n": net}, attn_metadata={"n": metadata})
    monkeypatch.setattr(gdn_attention, "get_forward_context", lambda: context)
    arguments = *inputs(1), torch.zeros(1, VALUES, V)
    gdn_attention.cpu_gdn_attention_core(*arguments, "n")
    assert seen == [(net, metadata, *arguments)]
    with pytest.raises(AssertionError, match="BF16"):
        gdn_attention.cpu_gdn_attention_core(arguments[0].float(), *arguments[1:], "n")
