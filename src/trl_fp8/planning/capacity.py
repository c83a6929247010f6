"""What fits into a GPU under a plan: the figures to look at before one is booked."""

from dataclasses import dataclass

from trl_fp8.recipe.outline import Outline

from .advice import recommended_flags, risks
from .plan import Plan


GIB = 2**30
# CUDA graphs, activations of a few thousand batched tokens, the context: what vLLM keeps beside weights and KV cache
RESERVED_BYTES = 3 * GIB


@dataclass(frozen=True)
class Capacity:
    """KV cache tokens of one engine in `gpu_bytes * utilization` on each of its ranks.

    `utilization` is the share of a GPU's memory that the engine gets (`vllm_gpu_memory_utilization`).
    """

    plan: Plan
    gpu_bytes: int
    utilization: float

    def tokens(self, weight_bytes: int, bytes_per_token: int) -> int:
        """Tokens that fit beside `weight_bytes`, both divided over the ranks; 0 if the weights alone do not fit."""
        ranks = self.plan.recipe.tensor_parallel_size
        free = self.gpu_bytes * self.utilization - weight_bytes / ranks - RESERVED_BYTES
        return max(0, int(free * ranks / bytes_per_token))

    @property
    def kv_tokens(self) -> dict[str, int]:
        plan = self.plan
        before, after = plan.kv_bytes_per_token_before, plan.kv_bytes_per_token_after
        found = {"bf16": self.tokens(plan.bytes_before, before), "fp8_linears": self.tokens(plan.bytes_after, before)}
        return found | ({"fp8_linears_kv": self.tokens(plan.bytes_after, after)} if plan.recipe.fp8_kv_cache else {})


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
        "fp8_share_of_parameters": plan.fp8_share,
        "risks": [risk.text for risk in risks(plan, outline)],
        "flags": recommended_flags(plan, outline, capacity.utilization),
    }


def as_text(capacity: Capacity, outline: Outline) -> str:
    """Lines for below the plan's table."""
    tokens = capacity.kv_tokens
    size = f"{capacity.gpu_bytes / GIB:g} GiB x {capacity.utilization:g}"
    if not any(tokens.values()):
        lines = [f"A GPU of {size} does not hold the weights."]
    else:
        shown = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in tokens.items())
        lines = [f"KV cache tokens in {size}: {shown}"]
    lines += [f"watch: {risk.text}" for risk in risks(capacity.plan, outline)]
    flags = recommended_flags(capacity.plan, outline, capacity.utilization)
    return "\n".join([*lines, "flags: " + " ".join(f"--{name} {value}" for name, value in flags.items())])
