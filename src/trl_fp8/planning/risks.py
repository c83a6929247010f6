"""Risks: what may go wrong with a model, to read before booking a GPU, and the flags that prevent it."""

from typing import NamedTuple

from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.recipe import formats_for, is_vision

from .plan import Plan
from .trainer_memory import Setup


LOW_SHARE = 0.5  # below this share of FP8 parameters a plan says so
SMALL = 1e9  # parameters below which a model is small


class Risk(NamedTuple):
    """One thing that may go wrong, and the flags of `FP8GRPOConfig` that answer it."""

    text: str  # one or two sentences
    flags: dict[str, str | float] = {}  # flag -> the value that answers the risk


def risks(plan: Plan, setup: Setup) -> list[Risk]:
    """Return the risks of a model and of each feature under a plan, without the risks that the run config answers.

    The run config answers a risk if one of the risk's flags has to be on and is on, or has to be off and is off. The
    `flags` of a returned risk are the flags that the run config should still set.
    """
    found = _of_model(plan, setup.args.base_in_engine)
    for group in setup.args.groups():
        found += group.risks(setup.args, plan.outline, plan.recipe)
    chosen = {name: value for name, value in (setup.run_config or {}).items() if value is not None}
    unanswered = []
    for risk in found:
        is_answered = any(name in chosen and _answers(chosen[name], value) for name, value in risk.flags.items())
        if is_answered:
            continue
        # Name the flags that are not set. Name a flag that has to be off even if it is set: with its value no run
        # starts
        flags = {name: value for name, value in risk.flags.items() if name not in chosen or not value}
        unanswered.append(Risk(risk.text, flags))
    return unanswered


def _answers(chosen: object, value: str | float) -> bool:
    """Return whether a flag's value `chosen` in the run config answers a risk as well as `value` does."""
    has_to_be_on = bool(value) and value != "off"
    if has_to_be_on:
        return bool(chosen) and chosen != "off"
    return chosen == value


def _of_model(plan: Plan, base_in_engine: bool) -> list[Risk]:
    """Return the risks of the model itself, which do not depend on features.

    `base_in_engine`: whether the policy's frozen base weights are the engine's FP8 weights.
    """
    outline = plan.outline
    recipe = plan.recipe
    found = []
    if not family_of(outline.config_type).tested:
        found.append(Risk(f"architecture not tested ({outline.config_type})."))
    if any(map(is_vision, outline.parameters)):
        found.append(Risk("its vision tower stays in BF16."))
        found.append(Risk("images with tensor parallelism, FSDP2 or ZeRO-3 have not been tested."))
    used_as_stored = base_in_engine and outline.stored_as == "fp8"
    if outline.stored_as and not used_as_stored:
        quantized = f"the checkpoint itself is quantized ({outline.stored_as})"
        at_syncs = ", and the engine gets weights that are quantized anew at every sync" if recipe.fp8_weights else ""
        found.append(Risk(f"{quantized}: it is dequantized for training{at_syncs}."))
    if not family_of(outline.model_type).experts_counted:
        text = "router_aux_loss_coef: TRL's load-balancing loss finds no num_experts in its config, and has to be off."
        found.append(Risk(text, {"router_aux_loss_coef": 0.0}))
    not_aligned = [name for name, reason in recipe.kept_modules.items() if "multiple" in reason]
    if not recipe.fp8_weights and "fp8_weights is off" not in recipe.kept_modules.values():
        # Name one linear layer and one expert module as examples. The output head and routers are no examples, because
        # they are BF16 in every model
        reasons = {}
        for name, reason in recipe.kept_modules.items():
            if reason not in ("output head", "router"):
                reasons[name] = reason
        linears = [name for name in reasons if name not in outline.experts]
        experts = [name for name in reasons if name in outline.experts]
        examples = ", ".join(f"{name} ({reasons[name]})" for name in sorted(linears[:1] + experts[:1]))
        formats = formats_for(outline, recipe.tensor_parallel_size)
        remedies = "".join(f" --fp8_weight_format {name} takes some." for name in formats)
        found.append(Risk(f"no weights can be FP8: {examples}.{remedies}"))
    elif not_aligned:
        in_bf16 = f"{len(not_aligned)} modules stay in BF16 because their shards do not {recipe.format.requirement}"
        is_split = recipe.tensor_parallel_size > 1
        remedy = "A smaller vllm_tensor_parallel_size may help." if is_split else "No flag helps: it is their shape."
        found.append(Risk(f"{in_bf16}: {listed(not_aligned, 1)}. {remedy}"))
    if recipe.fp8_weights and not recipe.format.on_all_gpus:
        major, minor = recipe.format.capability
        gpus = f"{recipe.format.name!r} weights start with compute capability {major}.{minor}"
        checked = "vLLM's choice of kernel, its layout of weights and scales, and its signatures"
        found.append(Risk(f"{gpus}, where they have never run: only {checked} were checked, without a GPU."))
    if recipe.fp8_weights and plan.fp8_share < LOW_SHARE:
        found.append(Risk(f"only {plan.fp8_share:.0%} of the parameters are FP8; --modules says which are not."))
    if plan.parameters < SMALL:
        found.append(Risk("below about 1 B parameters other projects lost more with FP8 rollouts than they gained."))
    return found
