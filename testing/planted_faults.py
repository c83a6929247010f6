"""Faults that make rollouts other samples than the policy's, planted in a trainer and taken out again.

Each makes a mismatch that no number format explains.
"""

from contextlib import contextmanager, nullcontext

import torch
from datasets import Dataset
from peft import LoraConfig

from trl_fp8.engine.vllm import delivered
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.upstream.vllm import engine_model


FILLER = " ".join(str(number) for number in range(10, 74))  # fills a block of the prefix cache: 128 tokens
LONG = {"vllm_max_model_length": 384, "explain_mismatch_steps": 1, "max_steps": 2}


def restart_of(trainer):
    """Return a function that gives the policy back the weights that it has now: each fault meets the same policy."""
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]

    @torch.no_grad()
    def restart():
        for parameter, weight in zip(trainer.model.parameters(), weights, strict=True):
            parameter.copy_(weight)

    return restart


def same_prompts():
    return Dataset.from_list([{"prompt": f"{FILLER} {row}+1="} for row in range(2)] * 4)


@contextmanager
def changed(tensor, factor):
    """Multiply a tensor of the engine inside the block."""
    before = tensor.clone()
    tensor.mul_(factor)
    try:
        yield
    finally:
        tensor.copy_(before)


@contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def while_sampling(plant):
    """Return a fault that `plant(engine's model)` makes before each call of the engine and undoes after it."""

    @contextmanager
    def fault(trainer):
        llm = trainer.vllm_generation.llm
        generate = llm.generate

        def generate_with_fault(*args, **kwargs):
            with plant(engine_model(llm)), torch.no_grad():
                return generate(*args, **kwargs)

        llm.generate = generate_with_fault
        try:
            yield
        finally:
            del llm.generate

    return fault


def other_kv_scales(model):
    attention = attention_layers(model)[1]
    return replaced(attention, "_k_scale_float", attention._k_scale_float / 8)


@contextmanager
def policy_one_step_old(trainer):
    """The second step samples from the weights of the first."""
    generation, calls = trainer.vllm_generation, []
    sync = generation.sync_weights

    def first_only():
        calls.append(1)
        if len(calls) == 1:
            sync()

    generation.sync_weights = first_only
    try:
        yield
    finally:
        del generation.sync_weights


@contextmanager
def other_token_ids(trainer):
    """The trainer gets ids by which another tokenizer, with two characters exchanged, would write the completions."""
    generate = trainer.vllm_generation.generate
    exchanged = trainer.processing_class.convert_tokens_to_ids(["1", "2"])

    def generate_and_write_otherwise(*args, **kwargs):
        prompts, completions, *rest = generate(*args, **kwargs)
        other = dict(zip(exchanged, reversed(exchanged), strict=True))
        return prompts, [[other.get(token, token) for token in ids] for ids in completions], *rest

    with replaced(trainer.vllm_generation, "generate", generate_and_write_otherwise):
        yield


@contextmanager
def other_chat_template(trainer):
    """The engine gets prompts that begin with a token which the trainer's template does not write."""
    generate, start = trainer.vllm_generation.generate, trainer.processing_class.bos_token_id

    def generate_from_other_prompts(prompts, *args, **kwargs):
        return generate([[start, *ids] for ids in prompts], *args, **kwargs)

    with replaced(trainer.vllm_generation, "generate", generate_from_other_prompts):
        yield


@contextmanager
def wrong_positions(trainer):
    """Two tokens at a time share a position, in every pass of the policy."""

    def pair(module, args, kwargs):
        ids = kwargs["input_ids"]
        return args, kwargs | {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None] // 2}

    handle = trainer.model.register_forward_pre_hook(pair, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def dropout_on(trainer):
    """Attention drops a tenth of its weights while the trainer scores rollouts and trains."""
    layers = [module for module in trainer.model.modules() if hasattr(module, "attention_dropout")]
    for layer in layers:
        layer.attention_dropout = 0.1
    try:
        yield
    finally:
        for layer in layers:
            layer.attention_dropout = 0.0


def other_scoring(trainer):
    """A subclass scores rollouts with a head of its own, here as if at a lower temperature."""
    score = trainer._get_per_token_logps_and_entropies

    def scored_otherwise(*args, **kwargs):
        logps, *rest = score(*args, **kwargs)
        return 1.1 * logps, *rest

    return replaced(trainer, "_get_per_token_logps_and_entropies", scored_otherwise)


# Name -> a context manager of a trainer
FAULTS = {
    "stale KV scale": while_sampling(other_kv_scales),
    "dropped layer scale": while_sampling(
        lambda model: changed(model.model.layers[0].mlp.down_proj.weight_scale_inv.data, 0.5)
    ),
    "head of other weights": while_sampling(lambda model: changed(model.lm_head.weight.data, 1.1)),
    "policy one step old": policy_one_step_old,
    "temperature on one side": lambda trainer: replaced(trainer.vllm_generation, "temperature", 0.8),
    "prefix cache not reset": lambda trainer: replaced(
        trainer.vllm_generation.engine, "reset_prefix_cache", lambda: None
    ),
    "another tokenizer": other_token_ids,
    "another chat template": other_chat_template,
    "wrong position ids": wrong_positions,
}
# Those that show between the trainer's log-probs and its policy's
SCORING_FAULTS = {"dropout in scoring": dropout_on, "a subclass that scores otherwise": other_scoring}


# Adapters that change the policy from the first step on
ADAPTERS = LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM", lora_alpha=64)


def adapters_unsent():
    """Let syncs send the base alone. The audit finds what was sent."""
    return replaced(delivered, "merged", lambda adapters: nullcontext())
