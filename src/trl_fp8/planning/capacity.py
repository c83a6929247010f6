"""What fits into a GPU under a plan, and what about the model deserves a look before one is booked."""

from dataclasses import dataclass
from typing import NamedTuple

from trl_fp8.recipe.names import listed
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import is_vision

from .plan import Plan


GIB = 2**30
# CUDA graphs, activations of a few thousand batched tokens, the context: what vLLM keeps beside weights and KV cache
RESERVED_BYTES = 3 * GIB


@dataclass(frozen=True)
class Capacity:
    """KV cache tokens of one engine that gets a share of the memory of each of its ranks' GPUs."""

    plan: Plan
    gpu_bytes: int
    utilization: float  # `vllm_gpu_memory_utilization`, the share

    @property
    def kv_tokens(self) -> dict[str, int]:
        """Tokens that fit beside the weights, both divided over the ranks; 0 if the weights alone do not fit."""
        plan, ranks = self.plan, self.plan.recipe.tensor_parallel_size
        before, after = plan.kv_bytes_per_token_before, plan.kv_bytes_per_token_after
        sizes = {"bf16": (plan.bytes_before, before), "fp8_linears": (plan.bytes_after, before)}
        sizes |= {"fp8_linears_kv": (plan.bytes_after, after)} if plan.recipe.fp8_kv_cache else {}
        free = self.gpu_bytes * self.utilization - RESERVED_BYTES
        return {name: max(0, int((free - held / ranks) * ranks / token)) for name, (held, token) in sizes.items()}


class Risk(NamedTuple):
    """What may go wrong, in one sentence or two, and the flags of `FP8GRPOConfig` that answer it."""

    text: str
    flags: dict[str, str | int]


def risks(plan: Plan, outline: Outline) -> list[Risk]:
    """Risks of running a model under a plan; empty if there is nothing to say."""
    recipe, found = plan.recipe, []
    key_biases = (name for name in outline.parameters if name.endswith(".k_proj.bias") and not is_vision(name))
    if recipe.fp8_kv_cache and any(key_biases):
        text = (
            f"{outline.model_type} has biases in q, k, v: some layers' keys may have outliers that FP8 keeps badly. "
            "kv_cache_skip_layers='auto' looks for them before the first rollout."
        )
        found.append(Risk(text, {"kv_cache_skip_layers": "auto"}))
    if recipe.has_experts:
        text = (
            "Mixture of experts: routers of engine and trainer can disagree. router_replay='monitor' measures it, "
            "'rollout' removes it."
        )
        found.append(Risk(text, {"router_replay": "monitor"}))
    if not_aligned := [name for name, reason in recipe.kept_modules.items() if "multiple" in reason]:
        kept = f"{len(not_aligned)} modules stay in BF16 because their shards do not {recipe.format.requirement}"
        split = recipe.tensor_parallel_size > 1
        remedy = "A smaller vllm_tensor_parallel_size may help." if split else "No flag helps: it is their shape."
        found.append(Risk(f"{kept}: {listed(not_aligned, 1)}. {remedy}", {}))
    return found


def recommended_flags(capacity: Capacity, outline: Outline) -> dict[str, str | int | float]:
    """Flags of `FP8GRPOConfig` to start with: those of the plan where they are no defaults, and those of its risks."""
    recipe = capacity.plan.recipe
    flags: dict[str, str | int | float] = {"vllm_gpu_memory_utilization": capacity.utilization}
    flags |= {"vllm_tensor_parallel_size": ranks} if (ranks := recipe.tensor_parallel_size) > 1 else {}
    flags |= {} if recipe.fp8_kv_cache else {"kv_cache_dtype": recipe.kv_cache_dtype}
    flags |= {"fp8_weight_format": recipe.format.name} if recipe.format.name != "blocks" else {}
    for risk in risks(capacity.plan, outline):
        flags |= risk.flags
    return flags


def as_json(capacity: Capacity, outline: Outline) -> dict:
    """The plan's figures under fixed names, for scripts."""
    plan, recipe = capacity.plan, capacity.plan.recipe
    kept = [name for name, reason in recipe.kept_modules.items() if reason != "router"]
    return {
        "model": plan.model_name,
        "weights_gib": {"bf16": plan.bytes_before / GIB, "fp8": plan.bytes_after / GIB},
        "kv_tokens": capacity.kv_tokens,
        "linears": {"fp8": len(recipe.fp8_modules), "high_precision": sum(not n.endswith(".experts") for n in kept)},
        "experts": {"fp8": len(recipe.fp8_experts), "high_precision": sum(n.endswith(".experts") for n in kept)},
        "weight_format": recipe.format.name,
        "fp8_share_of_parameters": plan.fp8_share,
        "risks": [risk.text for risk in risks(plan, outline)],
        "flags": recommended_flags(capacity, outline),
    }


def as_text(capacity: Capacity, outline: Outline) -> str:
    """Lines for below the plan's table."""
    tokens, size = capacity.kv_tokens, f"{capacity.gpu_bytes / GIB:g} GiB x {capacity.utilization:g}"
    shown = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in tokens.items())
    fits = f"KV cache tokens in {size}: {shown}"
    flags = " ".join(f"--{name} {value}" for name, value in recommended_flags(capacity, outline).items())
    lines = [fits if any(tokens.values()) else f"A GPU of {size} does not hold the weights."]
    lines += [f"watch: {risk.text}" for risk in risks(capacity.plan, outline)]
    return "\n".join([*lines, f"flags: {flags}"])
