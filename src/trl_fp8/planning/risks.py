"""Risks: properties of a model to look at before a GPU is booked, and the flags that answer them."""

from typing import NamedTuple

from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.recipe import formats_for, is_vision

from .plan import Plan
from .trainer_memory import Setup


LOW_SHARE = 0.5  # of the parameters
SMALL = 1e9  # parameters


class Risk(NamedTuple):
    """One thing that may go wrong, in one or two sentences, and the flags of `FP8GRPOConfig` that answer it."""

    text: str
    flags: dict[str, str | float] = {}


def risks(plan: Plan, setup: Setup) -> list[Risk]:
    """Return the risks of a model and of each feature under a plan.

    A flag that the run config sets, on or off, is left out of a risk's flags. If it is on, the risk is left out, too.
    """
    found = _of_model(plan, setup.args.base_in_engine)
    for group in setup.args.groups():
        found += group.risks(setup.args, plan.outline, plan.recipe)
    chosen = {name: value for name, value in (setup.run_config or {}).items() if value is not None}
    answered = {name for name, value in chosen.items() if value and value != "off"}
    return [
        Risk(risk.text, {name: value for name, value in risk.flags.items() if name not in chosen})
        for risk in found
        if answered.isdisjoint(risk.flags)
    ]


def _of_model(plan: Plan, base_in_engine: bool) -> list[Risk]:
    outline, recipe = plan.outline, plan.recipe
    found = []
    if not family_of(outline.config_type).tested:
        found.append(Risk(f"architecture not tested ({outline.config_type})."))
    if any(map(is_vision, outline.parameters)):
        found.append(Risk("its vision tower stays in BF16."))
        found.append(Risk("images with tensor parallelism, FSDP2 or ZeRO-3 have not been tested."))
    if outline.stored_as and not (base_in_engine and outline.stored_as == "fp8"):  # which is taken as it is
        stored = f"the checkpoint itself is quantized ({outline.stored_as})"
        anew = ", and the engine gets weights that are quantized anew at every sync" if recipe.fp8_weights else ""
        found.append(Risk(f"{stored}: it is dequantized for training{anew}."))
    if not family_of(outline.model_type).experts_counted:
        text = "router_aux_loss_coef: TRL's load-balancing loss finds no num_experts in its config, and has to be off."
        found.append(Risk(text, {"router_aux_loss_coef": 0.0}))
    if not recipe.fp8_weights and "fp8_weights is off" not in recipe.kept_modules.values():
        reasons = {name: why for name, why in recipe.kept_modules.items() if why not in ("output head", "router")}
        firsts = {name in outline.experts: name for name in reversed(reasons)}.values()  # a linear layer, and experts
        why = ", ".join(f"{name} ({reasons[name]})" for name in sorted(firsts))
        formats = formats_for(outline, recipe.tensor_parallel_size)
        takes = "".join(f" --fp8_weight_format {name} takes some." for name in formats)
        found.append(Risk(f"no weights can be FP8: {why}.{takes}"))
    elif not_aligned := [name for name, reason in recipe.kept_modules.items() if "multiple" in reason]:
        stay = f"{len(not_aligned)} modules stay in BF16 because their shards do not {recipe.format.requirement}"
        is_split = recipe.tensor_parallel_size > 1
        remedy = "A smaller vllm_tensor_parallel_size may help." if is_split else "No flag helps: it is their shape."
        found.append(Risk(f"{stay}: {listed(not_aligned, 1)}. {remedy}"))
    if recipe.fp8_weights and plan.fp8_share < LOW_SHARE:
        found.append(Risk(f"only {plan.fp8_share:.0%} of the parameters are FP8; --modules says which are not."))
    if plan.parameters < SMALL:
        found.append(Risk("below about 1 B parameters others lost more with FP8 rollouts than they gained."))
    return found
