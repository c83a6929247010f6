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
from trl_fp8.features.engine_head import engine_head
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


def found(model, flow):
    """Gradients of the policy, what its parts got and handed on, and the engine's logits of each row's tokens."""
    given, recorder, logits, kernels = batch(), Recorder(), [], flow.kernels

    def recorded(hidden):
        logits.append(type(kernels).logits(kernels, hidden))
        return logits[-1]

    kernels.logits = recorded
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    with substituted(trl_utils, "_ChunkedLogProbFunction", engine_head(flow)), visiting(model, recorder):
        output = model(**given, labels=labels, fused_lm_head=True)
    model.zero_grad()
    rows = zip(PROMPTS, output.log_probs, output.entropy, strict=True)
    sum(loss_of(row, *(each[1 - len(tokens) :] for each in of)) for row, (tokens, *of) in enumerate(rows)).backward()
    gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    return gradients, recorder.values, torch.cat(logits).view(len(PROMPTS), -1, logits[0].shape[-1])


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


@pytest.mark.parametrize("architecture, options", [("qwen3", {}), ("gemma3_text", {"tied": True}), ("cohere", {"tied": True})])
def test_gradients_are_those_of_the_straight_through_definition(architecture, options, checkpoint):
    folder = checkpoint(architecture, **options)
    generation = engines.start(folder)
    hook, scales = calibrated(generation)
    flow = follow(generation, hook)
    hook.simulate(scales.values)
    ours, values, logits = found(generation.model, flow)
    values = as_cached(values, scales.values)
    exact = expected(folder, values, logits)
    noisy = expected(folder, values, logits, rounding=lambda gradient: gradient.to(torch.bfloat16).double())
    for name in ours:
        e = exact[name]
        print(f"{name:50} {(ours[name]-e).norm()/e.norm():.5f} {(noisy[name]-e).norm()/e.norm():.5f}")
