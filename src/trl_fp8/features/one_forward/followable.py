"""Checks of a policy that is to follow an engine: `ValueError` for every policy that cannot."""

from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from trl_fp8.policy.model import transformers_model
from trl_fp8.policy.swapped import HoldsCodes
from trl_fp8.recipe.from_model import of_adapter, outline_of
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import TRANSFORMERS, checkpoint_name, is_router
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.patches import PATCHES

from .forward_flags import require_followed
from .one_forward import APPLY_ROTARY, computing, followed_embedding


def require_followable(model: nn.Module, recipe: FP8Recipe, fp8_backward: str) -> None:
    require_sums(model)
    require_followable_experts(recipe, fp8_backward)
    require_followed(outline_of(model))
    base = transformers_model(model)
    # A class from another file than transformers' own for this type
    if f"{type(base).__module__}.{APPLY_ROTARY}" not in PATCHES:
        raise ValueError(
            f"fp8_forward='one_forward' with a {type(base).__name__} of {type(base).__module__}: which operations "
            "of its layers an engine computes is known of transformers' own classes. Set fp8_forward='off'."
        )
    if dropout := getattr(base.config.get_text_config(), "attention_dropout", 0):
        raise ValueError(
            f"fp8_forward='one_forward' with attention_dropout={dropout} in the model's config: the engine's "
            "attention drops nothing. Load the model with attention_dropout=0.0 "
            "(model_init_kwargs={'attention_dropout': 0.0}, or from_pretrained(..., attention_dropout=0.0)), or set "
            "fp8_forward='off'."
        )
    ours = computing(base)
    for name, module in model.named_modules():
        if module not in ours:
            continue
        if isinstance(module, nn.Embedding):
            followed_embedding(module)
        elif isinstance(module, nn.Dropout) and module.p and not of_adapter(name, model):
            raise ValueError(
                f"fp8_forward='one_forward': {checkpoint_name(name)} drops {module.p:g} of its input, and the engine "
                "nothing. Load the model with a config that has no dropout (Phi-3: model_init_kwargs={'resid_pdrop': "
                "0.0}), or set fp8_forward='off'."
            )
        elif isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
            if not isinstance(module, HoldsCodes):
                raise ValueError(
                    f"fp8_forward='one_forward': {checkpoint_name(name)} is a {type(module).__name__}, whose own "
                    "forward would be lost. Set fp8_forward='off'."
                )


def require_followable_experts(recipe: FP8Recipe, backward: str) -> None:
    if recipe.fp8_experts and backward == "fp8":
        raise ValueError(
            f"fp8_backward='fp8' with FP8 experts ({listed(recipe.fp8_experts, 1)}): they have a straight-through "
            "backward only. Set fp8_backward='bf16', or keep them in high precision with fp8_ignored_modules."
        )


def require_sums(model: nn.Module) -> None:
    """Raise `ValueError` for adapters whose layers are not followed."""
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    kinds = {checkpoint_name(name): _other_than_sum(module) for name, module in adapters.items()}
    if others := [f"{name} ({kind})" for name, kind in kinds.items() if kind is not None]:
        raise ValueError(
            "fp8_forward='one_forward' with adapters that are not plain LoRA on linear layers, experts or routers: "
            f"{listed(others, 3)}. The engine holds them merged, and only of a sum is the gradient known without what "
            "the base alone computes. Use LoRA on these, without variants such as use_dora, or set fp8_forward='off'."
        )


def _other_than_sum(module: BaseTunerLayer) -> str | None:
    """Return the kind of an adapter; None if it adds to the output of a linear layer, or to experts or a router."""
    if type(module) is ParamWrapper:
        routes = module.parameter_name in TRANSFORMERS.fused or is_router(module.get_base_layer())
        return None if routes else f"of the parameter {module.parameter_name}"
    if type(module) is not LoraLinear:
        return f"{type(module).__module__.split('.')[-2]}.{type(module).__name__}"
    return next((type(variant).__name__ for variant in module.lora_variant.values()), None)
