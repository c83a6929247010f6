"""What about a model deserves a look before a GPU is booked, and the flags that answer it."""

from collections.abc import Mapping
from typing import NamedTuple

from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe, formats_for, is_vision

from .plan import Plan


LOW_SHARE = 0.5  # of the parameters
SMALL = 1e9  # parameters


class Risk(NamedTuple):
    """What may go wrong, in one sentence or two, and the flags of `FP8GRPOConfig` that answer it."""

    text: str
    flags: dict[str, str | float]


def risks(
    plan: Plan, outline: Outline, given: Mapping[str, object] | None = None, fp8_base: bool = False
) -> list[Risk]:
    """Risks of running a model under a plan, but those that the run config `given` answers already; a flag that it
    has, be it off, is its own, and none of a risk's. A shared `fp8_base` takes an FP8 checkpoint as it is.
    """
    chosen = {name: value for name, value in (given or {}).items() if value is not None}
    answered = {name for name, value in chosen.items() if value and value != "off"}
    return [
        Risk(risk.text, {name: value for name, value in risk.flags.items() if name not in chosen})
        for risk in _risks(plan, outline, fp8_base)
        if answered.isdisjoint(risk.flags)
    ]


def _risks(plan: Plan, outline: Outline, fp8_base: bool) -> list[Risk]:
    recipe, family, found = plan.recipe, family_of(outline.model_type), []
    if not family_of(outline.config_type).tested:
        found.append(Risk(f"architecture not tested ({outline.config_type}).", {}))
    if any(map(is_vision, outline.parameters)):
        found.append(Risk("its vision tower stays in BF16.", {}))
        found.append(Risk("images with tensor parallelism, FSDP2 or ZeRO-3: nobody has run them.", {}))
    if outline.stored_as and not (fp8_base and outline.stored_as == "fp8"):
        stored = f"the checkpoint itself is quantized ({outline.stored_as})"
        anew = ", and the engine gets weights that are quantized anew at every sync" if recipe.fp8_weights else ""
        found.append(Risk(f"{stored}: it is dequantized for training{anew}.", {}))
    key_biases = (name for name in outline.parameters if name.endswith(".k_proj.bias") and not is_vision(name))
    if recipe.fp8_kv_cache and any(key_biases):
        text = f"{outline.model_type} has biases in q, k, v: some layers' keys may have outliers that FP8 keeps badly."
        if fp8_base:
            text += " kv_cache_skip_layers takes their numbers, which a run without fp8_base finds with 'auto'."
            found.append(Risk(text, {}))
        else:
            text += " kv_cache_skip_layers='auto' looks for them before the first rollout."
            found.append(Risk(text, {"kv_cache_skip_layers": "auto"}))
    if recipe.has_experts:
        text = "Mixture of experts: routers of engine and trainer can disagree"
        if outline.top_k_routers and recipe.tensor_parallel_size == 1:
            text += ". router_replay='monitor' measures it, 'rollout' removes it."
            found.append(Risk(text, {"router_replay": "monitor"}))
        else:
            ranks = f"at vllm_tensor_parallel_size={recipe.tensor_parallel_size}"
            where = ranks if outline.top_k_routers else "of this model"
            found.append(Risk(f"{text}, which router_replay can neither measure nor remove {where}.", {}))
    if not family.experts_counted:
        text = "router_aux_loss_coef: TRL's load-balancing loss finds no num_experts in its config, and has to be off."
        found.append(Risk(text, {"router_aux_loss_coef": 0.0}))
    if not recipe.fp8_weights and "fp8_weights is off" not in recipe.kept_modules.values():
        found.append(Risk(_why_none(recipe, outline), {"fp8_weights": False}))
    elif not_aligned := [name for name, reason in recipe.kept_modules.items() if "multiple" in reason]:
        kept = f"{len(not_aligned)} modules stay in BF16 because their shards do not {recipe.format.requirement}"
        split = recipe.tensor_parallel_size > 1
        remedy = "A smaller vllm_tensor_parallel_size may help." if split else "No flag helps: it is their shape."
        found.append(Risk(f"{kept}: {listed(not_aligned, 1)}. {remedy}", {}))
    if recipe.fp8_weights and plan.fp8_share < LOW_SHARE:
        found.append(Risk(f"only {plan.fp8_share:.0%} of the parameters are FP8; --modules says which are not.", {}))
    if plan.parameters < SMALL:
        found.append(Risk("below about 1 B parameters others lost more with FP8 rollouts than they gained.", {}))
    return found


def _why_none(recipe: FP8Recipe, outline: Outline) -> str:
    """Of what, one linear layer and one module of experts, no format that was asked for can hold."""
    kept = [name for name, why in recipe.kept_modules.items() if why not in ("output head", "router")]
    firsts = {name in outline.experts: name for name in reversed(kept)}.values()
    why = ", ".join(f"{name} ({recipe.kept_modules[name]})" for name in sorted(firsts))
    others = formats_for(outline, recipe.tensor_parallel_size)
    return f"no weights can be FP8: {why}." + "".join(f" --fp8_weight_format {one} takes some." for one in others)
