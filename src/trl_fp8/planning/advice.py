"""What about a model deserves a look before a GPU is booked, each with the flags that help."""

from dataclasses import dataclass, field

from trl_fp8.recipe.names import listed
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import is_vision

from .plan import Plan


@dataclass(frozen=True)
class Risk:
    """One sentence or two, and the flags of `FP8GRPOConfig` that answer it."""

    text: str
    flags: dict[str, str | int] = field(default_factory=dict)


def risks(plan: Plan, outline: Outline) -> list[Risk]:
    """Risks of running a model under a plan; empty if there is nothing to say."""
    recipe, found = plan.recipe, []
    if recipe.fp8_kv_cache and any(_is_key_bias(name) for name in outline.parameters):
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
    not_aligned = [name for name, reason in recipe.kept_modules.items() if "multiple" in reason]
    if not_aligned:
        split = recipe.tensor_parallel_size > 1
        text = (
            f"{len(not_aligned)} modules stay in BF16 because their shards do not {recipe.format.requirement}: "
            f"{listed(not_aligned, 1)}. "
            f"{'A smaller vllm_tensor_parallel_size may help.' if split else 'No flag helps: it is their shape.'}"
        )
        found.append(Risk(text))
    return found


def _is_key_bias(name: str) -> bool:
    return name.endswith(".k_proj.bias") and not is_vision(name)


def recommended_flags(plan: Plan, outline: Outline, utilization: float) -> dict[str, str | int | float]:
    """Flags of `FP8GRPOConfig` to start with: those of the plan where they are no defaults, and those of its risks."""
    recipe = plan.recipe
    flags: dict[str, str | int | float] = {"vllm_gpu_memory_utilization": utilization}
    if recipe.tensor_parallel_size > 1:
        flags["vllm_tensor_parallel_size"] = recipe.tensor_parallel_size
    if not recipe.fp8_kv_cache:
        flags["kv_cache_dtype"] = recipe.kv_cache_dtype
    for risk in risks(plan, outline):
        flags |= risk.flags
    return flags
