"""The engine's output head in the place of TRL's: its log-probs, and TRL's gradients."""

from types import SimpleNamespace

import pytest
import torch
import trl.trainer.utils as trl_utils
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS
from trl.trainer.utils import add_fused_lm_head

from testing import tiny_models
from testing.fake_engine import followed
from trl_fp8.features.one_forward import followed_head as module
from trl_fp8.features.one_forward.followed_head import OPTIONAL, followed_head
from trl_fp8.upstream.patches import substituted


T, V, K = 37, 100, 64
TEMPERATURE = 0.7


def head_inputs(dtype=torch.float32, seed=0):
    """Hidden states, and a weight whose logits differ by a few."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, K, generator=generator).to(torch.bfloat16).requires_grad_()
    weight = (0.3 * torch.randn(V, K, generator=generator)).to(torch.bfloat16).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


class Kernels:
    """Logits in BF16 as TRL's own projection makes them on a CPU, so that both see the same ones."""

    def __init__(self, weight, scale=1.0, cap=None):
        self.held, self.scale, self.cap = weight.detach().to(torch.bfloat16), scale, cap
        self.rows = []

    def logits(self, hidden):
        self.rows.append(len(hidden))
        logits = torch.mm(hidden, self.held.t()) * self.scale
        return logits if self.cap is None else torch.tanh(logits.float() / self.cap) * self.cap


def apply(function, hidden, weight, targets, outputs, scale=1.0, cap=None):
    chunk = 48  # of the vocabulary, in TRL
    return function.apply(hidden, weight, None, targets, TEMPERATURE, chunk, cap, scale, outputs)


def test_the_optional_outputs_are_trls_in_its_order():
    assert OPTIONAL == OPTIONAL_OUTPUTS


@pytest.mark.parametrize("outputs", [(), ("entropy",), ("is_top1", "mean_logits"), OPTIONAL])
@pytest.mark.parametrize("scale, cap", [(1.0, None), (0.0625, None), (1.0, 3.0)])
@pytest.mark.parametrize("tokens", [1024, 10])
def test_values_and_gradients_are_trls_at_the_same_logits(outputs, scale, cap, tokens, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_A_TIME", tokens)
    results = []
    for of_engine in (False, True):
        hidden, weight, targets = head_inputs()
        kernels = Kernels(weight, scale, cap)
        forward = SimpleNamespace(kernels=kernels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = apply(
                followed_head(forward) if of_engine else ChunkedLogProbFunction,
                hidden,
                weight,
                targets,
                outputs,
                scale,
                cap,
            )
        log_probs, entropy, *optional = found
        loss = (log_probs * torch.linspace(-1, 1, T)).sum() + (0.3 * entropy.sum() if entropy is not None else 0.0)
        loss.backward()
        results.append(([log_probs, entropy, *optional], hidden.grad, weight.grad))
    assert sum(kernels.rows) == T and max(kernels.rows) <= tokens
    (theirs, *their_gradients), (of_engine, *gradients) = results
    for one, other in zip(theirs, of_engine, strict=True):
        assert (one is None) == (other is None)
        if one is not None and one.dtype == torch.bool:
            assert torch.equal(one, other) and not other.requires_grad
        elif one is not None:  # FP32 sums of 100 terms in other orders, of logits below 16
            assert one.dtype == other.dtype == torch.float32 and (one - other).abs().max() < 2**-17
    for one, other in zip(their_gradients, gradients, strict=True):
        # a normalizer that differs in FP32 moves few BF16 roundings of the logits' gradients
        assert one.dtype == other.dtype and (one - other).norm() < 1e-3 * one.norm()


def test_an_entropy_that_is_only_logged_costs_no_gradient(monkeypatch):
    hidden, weight, targets = head_inputs()
    forward = SimpleNamespace(kernels=Kernels(weight))
    log_probs, entropy, *_ = apply(followed_head(forward), hidden, weight, targets, ("entropy",))
    assert entropy.requires_grad
    seen = []
    backward = log_probs.grad_fn
    backward.register_prehook(lambda gradients: seen.append([gradient is None for gradient in gradients]))
    log_probs.sum().backward()
    assert seen[0][:2] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_and_masters_of_either_dtype(dtype):
    hidden, weight, targets = head_inputs(dtype)
    forward = SimpleNamespace(kernels=Kernels(weight))
    apply(followed_head(forward), hidden, weight, targets, ())[0].sum().backward()
    assert weight.grad.dtype == dtype and hidden.grad.dtype == torch.bfloat16
    expected, hidden.grad = hidden.grad, None
    apply(followed_head(forward), hidden, weight.detach(), targets, ())[0].sum().backward()
    assert torch.equal(hidden.grad, expected)


def test_a_followed_policy_scores_with_the_engines_logits():
    """Through TRL's fused head, over a batch with padding; TRL's own function would read the policy's weight."""
    model = tiny_models.build()
    forward, engine = followed(model)
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    ids = torch.randint(4, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)  # which the engine has not been sent
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float() / TEMPERATURE
        with substituted(trl_utils, "_ChunkedLogProbFunction", followed_head(forward)):
            found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    real = mask[:, 1:].bool()
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.equal(found[real], expected[real])
