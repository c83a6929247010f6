"""An engine's samples, the values of its layers and routers, and a policy that follows it."""

from contextlib import contextmanager

import torch
import trl.trainer.utils as trl_utils
from vllm import SamplingParams

from trl_fp8.features.kv_cache.observation import observe_sequences
from trl_fp8.features.one_forward.followed_head import followed_head
from trl_fp8.features.one_forward.followed_linear import BackwardPrecision
from trl_fp8.features.one_forward.one_forward import OneForward
from trl_fp8.features.one_forward.same_model import Witness
from trl_fp8.features.router_replay.replay import RouterReplay
from trl_fp8.policy.hook import hook_of
from trl_fp8.quantization.codec.kv_scales import kv_scales_from_amax
from trl_fp8.upstream.patches import substituted
from trl_fp8.upstream.vllm import engine_model

from . import engines


PROMPTS = [[4 + 7 * p % 50 for p in range(20)], [4 + (11 * p + 3) % 50 for p in range(31)]]
DECODED = 16


def sampled(generation):
    """Return sequences of two lengths and the engine's log-probs of all tokens but the first, prompt and decode."""
    parameters = SamplingParams(
        temperature=1.0, seed=1, max_tokens=DECODED, logprobs=1, prompt_logprobs=1, ignore_eos=True
    )
    sequences, log_probs = [], []
    for output in generation.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False):
        completion = output.outputs[0]
        sequences.append(list(output.prompt_token_ids) + list(completion.token_ids))
        rows = [*output.prompt_logprobs[1:], *completion.logprobs]
        log_probs.append(torch.tensor([row[t].logprob for row, t in zip(rows, sequences[-1][1:], strict=True)]))
    return sequences, log_probs


def sample(generation, max_tokens=12):
    """Generate rollouts; return the token ids of each, prompt and completion."""
    parameters = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in engines.PROMPTS]
    outputs = generation.llm.generate(prompts, parameters, use_tqdm=False)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def agreement(model, sequences, found, shift=0):
    """Return the share of (token, layer) where BF16 routers choose as the engine's, `shift` tokens earlier."""
    replay = RouterReplay(model)
    same = total = 0
    for tokens, rows in zip(sequences, found, strict=True):
        with torch.no_grad(), replay.during(None, replay=False, record=True):
            model(input_ids=torch.tensor([tokens[:-1]]))
        own = replay.recorded()[0].sort(-1).values.long()
        theirs = torch.from_numpy(rows).sort(-1).values.long()
        if shift:
            own, theirs = own[shift:], theirs[:-shift]
        same += (own == theirs).all(-1).sum().item()
        total += own[..., 0].numel()
    return same / total


def calls_of(generation, name):
    """Record inputs and outputs of one of the engine's layers while it generates."""
    seen = []

    def record(module, args, output):
        seen.append((args[0].clone(), output[0].clone()))

    hook = engine_model(generation.llm).get_submodule(name).register_forward_hook(record)
    sampled(generation)
    hook.remove()
    return seen


def calibrated(generation, prompts=PROMPTS, margin=2.0):
    """Calibrate a policy's KV cache and sync its engine. Return the policy's hook and the scales."""
    hook = hook_of(generation.model)
    hook.skip(generation.recipe.kv_cache_skip_layers)
    amax_L3 = observe_sequences(generation.model, hook, prompts).amax_L3
    scales = kv_scales_from_amax(amax_L3, margin, hook.kv_layers)
    if generation.recipe.fp8_kv_cache:
        engines.scales_of(generation).calibrate = lambda: scales
    generation.sync_weights()
    return hook, scales


def backward_of(generation, **fields):
    """Return how a policy that follows an engine quantizes the operands of its backward."""
    recipe, numerics = generation.recipe, generation.numerics
    scaling = numerics.linears
    formats = {"format": recipe.format, "scale_format": recipe.scale_format}
    return BackwardPrecision(**formats, operand_scale_format=scaling.scale_format if scaling else "pow2", **fields)


def follow(generation, hook=None, model=None, **fields):
    """Let the policy, or `model`, compute as its engine does."""
    model = generation.model if model is None else model
    if hook is None:
        hook = hook_of(model)
        hook.skip(generation.recipe.kv_cache_skip_layers)
    return OneForward(model, generation.recipe, generation.kernels, backward_of(generation, **fields), hook)


def scored(forward, model, sequences, head=None):
    """Return log-probs of each sequence but its first token, from one left-padded batch, as the trainer scores them:
    through TRL's fused output head, or `head`.
    """
    length = max(map(len, sequences))
    ids = torch.tensor([[0] * (length - len(tokens)) + tokens for tokens in sequences])
    real = torch.tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in sequences])
    if "forward" not in vars(model):
        trl_utils.add_fused_lm_head(model)
    with torch.no_grad(), substituted(trl_utils, "_ChunkedLogProbFunction", head or followed_head(forward)):
        output = model(input_ids=ids, attention_mask=real, labels=ids.where(real.bool(), -100), fused_lm_head=True)
    return [row[length - len(tokens) :] for row, tokens in zip(output.log_probs, sequences, strict=True)]


def witnessed(forward, model, longest=64):
    """Compare the policy's modules with its engine's over one sequence, and return the findings."""
    witness = Witness(model, forward.kernels, forward.hook, longest, forward)
    with witness.watching():
        scored(forward, model, PROMPTS[:1], followed_head(forward, witness.values.head))
    return witness.findings


@contextmanager
def left_out(forward, mixin):
    """Let the modules that follow by `mixin`, which are yielded, compute by themselves inside the block."""
    followed = {module: type(module) for module in forward.modules.values() if issubclass(type(module), mixin)}
    try:
        for module, cls in followed.items():
            module.__class__ = cls.before
        yield list(followed)
    finally:
        for module, cls in followed.items():
            module.__class__ = cls


def differences(first, second):
    """Return |difference| of prompt tokens, and of the `DECODED` last ones."""
    pairs = [(a - b).abs() for a, b in zip(first, second, strict=True)]
    return torch.cat([row[:-DECODED] for row in pairs]), torch.cat([row[-DECODED:] for row in pairs])
