"""Attention with rounded weights against loops in float64, against torch's own, and under a hook."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from trl_fp8.policy.attention import rounded as module
from trl_fp8.policy.attention.hook import AttentionHook
from trl_fp8.policy.attention.rounded import rounded_attention
from trl_fp8.quantization.e4m3 import E4M3


B, H, G, T, D = 2, 4, 2, 21, 16
SCALING = D**-0.5


def states(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(B, heads, T, D, generator=generator).to(dtype) for heads in (H, G, G))


def padded_mask():
    """`[B, 1, T, T]` bool: causal, the second sequence with 5 tokens of padding on the left."""
    mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, 1, T, T).clone()
    mask[1, :, :, :5] = False
    return mask


def loops(query, key, value, mask, offset):
    """The definition, query by query, in float64."""
    output = torch.zeros(B, T, H, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = [s for s in range(T) if mask[b, 0, t, s]]
                if not seen:
                    continue
                k, v = key[b, h // (H // G), seen].double(), value[b, h // (H // G), seen].double()
                scores = SCALING * (k @ query[b, h, t].double())
                weights = (scores - scores.max()).exp()
                rounded = (weights * offset).float().to(E4M3).double() / offset
                output[b, t, h] = rounded @ v / weights.sum()
    return output


@pytest.mark.parametrize("offset", [1.0, 256.0])
def test_equals_the_definition(offset):
    q, k, v = states()
    expected = loops(q, k, v, padded_mask(), offset)
    found = rounded_attention(q, k, v, padded_mask(), SCALING, offset)
    off = (found - expected).abs()
    # a weight next to a boundary may be rounded the other way in FP32: an e4m3 step, at most 1/8, of one value
    assert (off > 5e-6).float().mean() < 0.01 and off.max() <= v.abs().max() / 8
    assert torch.equal(found[1, :5], torch.zeros(5, H, D))  # padding sees nothing, and is no NaN


def test_masks_of_transformers_mean_the_same():
    q, k, v = states()
    causal = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, T, T).masked_fill(~causal, torch.finfo(torch.float32).min)
    by_default, *others = (rounded_attention(q, k, v, mask, SCALING, 1.0) for mask in (None, causal, added))
    assert all(torch.equal(by_default, other) for other in others)
    with pytest.raises(ValueError, match="20 queries over 21 keys without a mask"):
        rounded_attention(q[:, :, 1:], k, v, None, SCALING, 1.0)


@pytest.mark.parametrize("mask", [None, padded_mask()], ids=["causal", "padded"])
def test_chunks_change_nothing(mask):
    q, k, v = states()
    whole = rounded_attention(q, k, v, mask, SCALING, 256.0, chunk=T)
    for chunk in (1, 8, 20):
        torch.testing.assert_close(
            rounded_attention(q, k, v, mask, SCALING, 256.0, chunk=chunk), whole, rtol=0, atol=1e-5
        )


def test_without_rounding_it_is_torchs_attention_and_so_are_its_gradients(monkeypatch):
    monkeypatch.setattr(module, "straight_through", lambda weights, rounding: weights)
    ours, theirs = states(), states()
    for tensor in (*ours, *theirs):
        tensor.requires_grad_()
    found = rounded_attention(*ours, None, SCALING, 1.0, chunk=8)
    expected = F.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    found.backward(cotangent)
    expected.backward(cotangent)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=1e-5)


def test_gradients_pass_the_rounding_straight_through():
    q, k, v = (tensor.requires_grad_() for tensor in states())
    rounded_attention(q, k, v, None, SCALING, 1.0, chunk=8).sum().backward()
    assert all(tensor.grad.isfinite().all() and tensor.grad.abs().max() > 0 for tensor in (q, k, v))
    # values get the rounded weights: those that became zero give no gradient
    ones = torch.ones(1, 1, 2, 1)
    key = torch.tensor([math.log(2.0**12), 0.0]).view(1, 1, 2, 1)
    value = torch.ones(1, 1, 2, 1, requires_grad=True)
    rounded_attention(ones, key, value, torch.ones(1, 1, 2, 2, dtype=torch.bool), 1.0, 1.0).sum().backward()
    assert value.grad[0, 0, 1, 0] == 0 and value.grad[0, 0, 0, 0] > 1.9


def test_no_scores_are_kept_for_the_backward():
    q, k, v = (torch.randn(1, heads, 512, 8, requires_grad=True) for heads in (2, 1, 1))
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        plain = F.softmax(q @ k.mT, -1)
    assert max(kept.values()) == plain.nbytes
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rounded_attention(q, k, v, None, 1.0, 1.0, chunk=64)
    assert sum(kept.values()) < plain.nbytes / 8


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_hook_rounds_under_scales_only_and_in_layers_with_an_fp8_cache_only(implementation, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), attn_implementation=implementation).eval()
    tokens = torch.arange(2 * 12).view(2, 12) % 50 + 4
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0

    @torch.no_grad()
    def logits():
        return model(input_ids=tokens, attention_mask=mask).logits[:, 3:]

    plain = logits()
    hook = AttentionHook(model)
    hook.follow(weight_offset=1.0)
    assert torch.equal(logits(), plain)  # no scales: nothing is simulated
    hook.simulate(torch.full((2, 3), 2.0**-5))
    rounded = logits()
    hook.follow()
    assert not torch.equal(rounded, logits())
    hook.skip({0, 1})
    unsimulated = logits()
    hook.follow(weight_offset=1.0)
    assert torch.equal(logits(), unsimulated)


def test_what_cannot_be_simulated_is_named(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    hook = AttentionHook(model)
    hook._implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match="simulate_attention_weights=True with attn_implementation='flash_attention_2'.*'sdpa'"
    ):
        hook.follow(weight_offset=1.0)
    hook._implementation = "sdpa"
    hook.follow(weight_offset=1.0)
    hook.simulate(torch.ones(2, 3))
    for beyond in ({"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match=f"has {next(iter(beyond))}, which the simulation does not"):
            hook.attend(None, model.model.layers[0].self_attn, *states(), None, scaling=1.0, **beyond)
