"""Gradients of a policy that computes as a real engine, per parameter, against the straight-through definition."""

import pytest
import torch
import trl.trainer.utils as trl_utils
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from testing import engines
from testing.fp8_oracle import e4m3
from testing.rollouts import PROMPTS, calibrated, follow
from testing.straight_through import Recorder, gradients, valued, visiting
from trl_fp8.features.one_forward import followed_attention as packed
from trl_fp8.features.one_forward import followed_linear as linear
from trl_fp8.features.one_forward.between import (
    FollowedEmbedding,
    FollowedMLP,
    FollowedNorm,
    FollowedScaledEmbedding,
    RotaryCall,
)
from trl_fp8.features.one_forward.followed_head import followed_head
from trl_fp8.policy.swapped import with_value
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_activation
from trl_fp8.upstream.patches import substituted


pytestmark = pytest.mark.engine

TEMPERATURE = 0.7


def batch():
    """Two lengths, padded on the left."""
    length = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (length - len(tokens)) + tokens for tokens in PROMPTS])
    mask = torch.tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in PROMPTS])
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(row, log_probs, entropy):
    """Some tokens of a row are made more likely, others less, and the entropy counts."""
    wanted = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(row))
    return (wanted * log_probs + 0.1 * entropy).sum()


class Followed:
    """The policy of a checkpoint, with an engine that it follows over an FP8 cache."""

    def __init__(self, folder):
        generation = engines.start(folder)
        self.folder, self.model, self.llm = folder, generation.model, generation.llm
        hook, self.scales = calibrated(generation)
        self.forward = follow(generation, hook)
        hook.simulate(self.scales.values)
        add_fused_lm_head(self.model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))

    def gradients(self, recorder, logits):
        """Run the policy. Keep inputs and outputs of its parts, and the engine's logits of each row's tokens."""
        inputs, kernels = batch(), self.forward.kernels

        def recorded(hidden):
            logits.append(type(kernels).logits(kernels, hidden))
            return logits[-1]

        kernels.logits = recorded
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        head = substituted(trl_utils, "_ChunkedLogProbFunction", followed_head(self.forward))
        with head, visiting(self.model, recorder):
            output = self.model(**inputs, labels=labels, fused_lm_head=True)
        self.model.zero_grad()
        rows = zip(PROMPTS, output.log_probs, output.entropy, strict=True)
        losses = [loss_of(row, *(each[1 - len(tokens) :] for each in of)) for row, (tokens, *of) in enumerate(rows)]
        sum(losses).backward()
        return {name: parameter.grad.double() for name, parameter in self.model.named_parameters()}

    def defined(self, values, logits):
        """Gradients of the definition, and what it costs there to round what passes from part to part to BF16."""
        values = as_cached(values, self.scales.values)
        logits = torch.cat(logits).view(len(PROMPTS), -1, logits[0].shape[-1])
        exact = expected(self.folder, values, logits)
        return exact, relative(expected(self.folder, values, logits, rounding=in_bf16), exact)


def as_cached(values, scales):
    """k and v of each layer as an FP8 cache holds them, re-derived."""
    rounded = {}
    for layer, (_, k_scale, v_scale) in enumerate(scales.double()):
        for name, scale in ((f"{layer}.k", k_scale), (f"layers.{layer}.self_attn.v_proj ->", v_scale)):
            rounded[name] = e4m3(values[name].double() / scale) * scale
    return values | rounded


def expected(folder, values, logits, rounding=None):
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").double()
    sequences = [torch.tensor(tokens) for tokens in PROMPTS]

    def loss(row, own):
        following = sequences[row][1:]
        log_p = (valued(own[:-1], logits[row, -len(following) :]) / TEMPERATURE).log_softmax(-1)
        return loss_of(row, log_p.gather(-1, following[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))

    return gradients(twin, values, sequences, loss, rounding)


def in_bf16(gradient):
    return gradient.to(torch.bfloat16).double()


def relative(found, exact):
    return {name: ((found[name] - one).norm() / one.norm()).item() for name, one in exact.items()}


def apart(found, exact, cost):
    """Parameters whose gradients are further from the definition than rounding explains."""
    return [name for name, error in relative(found, exact).items() if not error < 1.5 * cost[name]]


@pytest.fixture
def broken(monkeypatch):
    """Backwards that are not those of what is computed, by name; each is in force until the next one."""

    def norm_without_its_mean_square(self, x, weight):
        scale = 1 + weight if "Gemma" in type(self).__name__ else weight
        return scale * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt().detach()

    def quantized_weight_gradient(dy, x, scale, precision):
        return dy.float().t() @ dequantize_weight(quantize_activation(x.flatten(0, -2)), torch.float32)

    def embedding_without_its_scale(self, ids):
        rows = FollowedEmbedding.forward(self, ids)
        return with_value(rows, (rows * self.embed_scale.to(rows.dtype)).detach())

    def swapped(*args):
        dq, dk, dv = plain_gradients(*args)
        return dq, dv, dk

    unturned, plain_gradients = RotaryCall.__call__, packed.plain_gradients
    patches = {
        "norm": (FollowedNorm, "_policy_value", norm_without_its_mean_square),
        "linear": (linear, "_weight_gradient", quantized_weight_gradient),
        "activation": (FollowedMLP, "_policy_value", lambda self, gate, up: gate * up),
        "turn": (RotaryCall, "__call__", lambda self, apply, q, k: unturned(self, lambda q, k, *turn: (q, k), q, k)),
        "attention": (packed, "plain_gradients", swapped),
        "embedding": (FollowedScaledEmbedding, "forward", embedding_without_its_scale),
    }

    def breaking():
        for name, patch in patches.items():
            with monkeypatch.context() as block:
                block.setattr(*patch)
                yield name

    return breaking


@pytest.mark.parametrize(
    "architecture, options", [("qwen3", {}), ("gemma3_text", {"tied": True}), ("cohere", {"tied": True})]
)
def test_gradients_are_those_of_the_straight_through_definition(architecture, options, checkpoint, broken):
    """Gradients are as close to the definition as BF16 between parts allows; with any broken backward they are not.

    The bound is measured on the definition itself: what it costs there to round each gradient that passes from part to
    part to BF16, as autograd does between BF16 tensors. The policy rounds at these places, too; its GEMMs add in FP32,
    which is nothing beside that, and where gradients of a residual stream meet, their sum is rounded once more. A
    parameter has 64 elements or more, over which the errors average out.
    """
    policy, recorder, logits = Followed(checkpoint(architecture, **options)), Recorder(), []
    found = policy.gradients(recorder, logits)
    exact, cost = policy.defined(recorder.values, logits)
    assert apart(found, exact, cost) == []
    assert max(cost.values()) < 0.01
    absent = set() if architecture == "gemma3_text" else {"embedding"}
    for name in broken():
        assert bool(apart(policy.gradients(Recorder(), []), exact, cost)) == (name not in absent), name
    engines.shutdown(policy.llm)
