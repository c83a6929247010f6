"""The backward of an engine's attention against autograd through the definition, sequence by sequence in float64."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trl_fp8.features.one_forward import followed_attention as module
from trl_fp8.features.one_forward.followed_attention import flash_gradients, packed_attention, plain_gradients
from trl_fp8.quantization.codec.e4m3 import E4M3


H, G, D = 4, 2, 16
SCALING = D**-0.5
LENGTHS = (5, 1, 23, 12)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
CASES = pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(None, None, 0), (4, None, 0), (1, None, 0), (None, 3.0, 0), (7, 2.0, 0), (None, None, 1), (4, 2.0, 1)],
    ids=str,
)


def states(heads=H, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS), count, D) for count in (heads, G, G))
    return [2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def definition(query, key, value, window, softcap, sinks=()):
    """Output `[N, H, D]` and lse `[H, N]`, one sequence and one head at a time."""
    outputs, sums = [], []
    for start, end in zip(STARTS.tolist(), STARTS.tolist()[1:], strict=False):
        q, k, v = query[start:end], key[start:end], value[start:end]
        t = torch.arange(end - start)
        seen = t[:, None] >= t
        if window is not None:
            seen &= t[:, None] - t < window
        heads = []
        for head in range(q.shape[1]):
            group = head * k.shape[1] // q.shape[1]
            s = SCALING * q[:, head] @ k[:, group].T
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            s = s.masked_fill(~seen, float("-inf"))
            if len(sinks):
                s = torch.cat([s, sinks[head].expand(len(s), 1)], 1)
            heads.append((s.softmax(-1)[:, : len(t)] @ v[:, group], s.logsumexp(-1)))
        outputs.append(torch.stack([output for output, _ in heads], 1))
        sums.append(torch.stack([lse for _, lse in heads]))
    return torch.cat(outputs), torch.cat(sums, 1)


def gradients(attend, inputs, weights) -> list[Tensor]:
    leaves = [one.detach().requires_grad_() for one in inputs]
    return list(torch.autograd.grad((attend(*leaves) * weights).sum(), leaves))


@CASES
@pytest.mark.parametrize("heads", [4, 2, 6])
@pytest.mark.parametrize("scores", [1, 2**11, module.SCORES])
def test_gradients_are_those_of_the_definition(window, softcap, sinks, heads, scores, monkeypatch):
    monkeypatch.setattr(plain_gradients, "__defaults__", (scores,))
    inputs = [*states(heads), *([torch.linspace(-2, 3, heads, dtype=torch.float64).bfloat16().double()] * sinks)]
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def engine(*rounded):
        return *definition(*rounded, window, softcap, *inputs[3:]), rounded

    options = (STARTS, max(LENGTHS), SCALING, window, softcap)
    found = gradients(lambda q, k, v, *s: packed_attention(engine, q, k, v, *options, *s), inputs, weights)
    expected = gradients(lambda q, k, v, *s: definition(q, k, v, window, softcap, *s)[0], inputs, weights)
    bound = 1e-12 * max(one.abs().max() for one in expected)  # a window of 1 leaves q and k no gradient
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() < bound


def test_the_output_is_the_engines_and_the_gradient_that_of_what_it_rounded():
    inputs = states(dtype=torch.bfloat16)
    rounded = [one.to(E4M3).to(torch.bfloat16) for one in inputs]
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    answer = torch.randn(inputs[0].shape).bfloat16()  # whatever the kernel's own roundings make of it
    lse = definition(*(one.double() for one in rounded), None, None)[1]

    def attend(*qkv):
        result = packed_attention(
            lambda *qkv: (answer, lse.float(), tuple(rounded)), *qkv, STARTS, max(LENGTHS), SCALING
        )
        assert torch.equal(result, answer)
        return result

    found = gradients(attend, inputs, weights)
    exact = [one.double() for one in rounded]
    expected = gradients(lambda *qkv: definition(*qkv, None, None)[0], exact, weights.double())
    of_what_was_given = [one.double() for one in inputs]
    other = gradients(lambda *qkv: definition(*qkv, None, None)[0], of_what_was_given, weights.double())
    for one, right, wrong in zip(found, expected, other, strict=True):
        assert one.dtype == torch.bfloat16
        # half a BF16 step; FP32 lse is good to 2**-24 of its own size, which is below 2**5
        bound = 2**-8 * right.abs() + 2**-18 * right.abs().max()
        assert ((one.double() - right).abs() <= bound).all()
        assert not ((one.double() - wrong).abs() <= bound).all()


def test_a_window_reads_only_the_keys_that_it_sees():
    """NaN in keys that no later query sees stays where it is."""
    query, key, value = states()
    value[0] = float("nan")
    lse = torch.zeros(H, len(query), dtype=torch.float64)
    options = (STARTS, max(LENGTHS), SCALING, 2, None)
    dq, _, _ = plain_gradients([query, key, value], lse, torch.ones_like(query), *options, scores=1)
    assert torch.isnan(dq[:2]).any() and not torch.isnan(dq[2:5]).any() and not torch.isnan(dq[5:]).any()


@pytest.mark.parametrize("exact", [True, False])
def test_flash_attention_takes_what_it_is_given(exact):
    """Names, order and number of arguments, and shapes, of torch's operators; nothing is computed."""
    with FakeTensorMode():
        shapes = ((sum(LENGTHS), heads, D) for heads in (H, G, G))
        rounded = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        softmax = (torch.empty_like(rounded[0]), rounded[0].new_empty(H, sum(LENGTHS), dtype=torch.float32))
        found = flash_gradients(
            *(rounded, softmax if exact else None, torch.empty_like(rounded[0], dtype=torch.float32)),
            *(torch.empty(len(STARTS), dtype=torch.int32, device="meta"), max(LENGTHS), SCALING, 4),
        )
    assert [one.shape for one in found] == [one.shape for one in rounded]
