"""Checks of flags and adapters, for adapters on an FP8 base whose weights exist only in the engine.

require_trainable_base    checks arguments, before a model is loaded
require_frozen_base       checks that no FP8 layer is trained whole, before these layers lose their weights
require_adaptable         checks the adapters, once the policy has them
"""

from collections.abc import Container

from peft import PeftConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import TrainingArguments

from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import MLA, checkpoint_name
from trl_fp8.recipe.recipe import FP8Recipe, adapter_targets


OFF = "or set fp8_base=False."  # last words of the errors
INDEPENDENT_INITS = True, False, "gaussian"  # values of `init_lora_weights` that read no weight of the base


def require_trainable_base(args: TrainingArguments, peft_config: PeftConfig | None, quantization: object) -> None:
    """Raise `ValueError` for arguments that no trainer with a shared base can have. Runs before a model is loaded."""
    init = getattr(peft_config, "init_lora_weights", True)
    if init not in INDEPENDENT_INITS:
        raise ValueError(
            f"fp8_base=True with init_lora_weights={init!r}: PEFT would compute the adapters from the base's weights, "
            f"which the policy does not have. Use one of {list(INDEPENDENT_INITS)}, {OFF}"
        )
    if quantization is not None:
        raise ValueError(
            f"fp8_base=True with quantization_config={type(quantization).__name__}(...): the base is quantized to FP8 "
            f"for trainer and engine, and to nothing else. Remove quantization_config, {OFF}"
        )
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "fp8_base=True under ZeRO-3, which shards weights over ranks, but the base is in each rank's engine as a "
            f"whole. Use DDP, FSDP2 or ZeRO-2, {OFF}"
        )


def require_adaptable(model: nn.Module, recipe: FP8Recipe) -> None:
    """Raise `ValueError` for a policy without trainable adapters, or with adapters that an engine cannot hold."""
    adapters = {}  # checkpoint name of a layer -> PEFT's wrapper of the layer
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            adapters[checkpoint_name(name)] = module
    if not adapters:
        raise ValueError(
            "fp8_base=True without adapters: the base is frozen, so nothing would be trained. Pass a peft_config "
            f"(LoraConfig), {OFF}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "fp8_base=True with adapters that are frozen: nothing would be trained. Load them with "
            "PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    linears = [name for name in (*recipe.fp8_modules, *recipe.kept_modules) if name != "lm_head"]
    reasons = {name: _why_not(name, layer, linears) for name, layer in adapters.items()}
    refused = [f"{name} ({why})" for name, why in reasons.items() if why]
    if refused:
        raise ValueError(
            f"fp8_base=True with adapters that the engine has no room for: {listed(refused, 3)}. Use plain LoRA on "
            f"linear layers (with experts or MLA target_modules={adapter_targets(linears)}, not 'all-linear'), {OFF}"
        )
    saved_under: set[str] = set()  # names of adapters that have modules_to_save
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved_under.update(module.active_adapters)
    misnamed = sorted(saved_under - {"default"})
    if misnamed:
        raise ValueError(
            f"fp8_base=True with modules_to_save of an adapter called {listed(misnamed)}: a sync sends whole modules "
            f"only of the adapter called 'default'. Give it that name, remove modules_to_save, {OFF}"
        )


def require_frozen_base(model: nn.Module, config: PeftConfig | None, recipe: FP8Recipe) -> None:
    """Raise `ValueError` if `modules_to_save` trains whole FP8 layers. Call it before these lose their weights."""
    ends = tuple(getattr(config, "modules_to_save", None) or ())
    # PEFT copies each module whose name in the PEFT model ends with an entry of the list, and all modules inside. The
    # model may be a PEFT model already, or become one after this check
    copied: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) or f"base_model.model.{name}".endswith(ends):
            copied.append(f"{checkpoint_name(name)}.")
    fp8_modules = (*recipe.fp8_modules, *recipe.fp8_experts)
    starts = tuple(copied)
    trained = [name for name in fp8_modules if f"{name}.".startswith(starts)]
    if trained:
        raise ValueError(
            f"fp8_base=True with modules_to_save that are FP8: {listed(trained, 3)}. Trainer and engine share the FP8 "
            "weights, so these are frozen. PEFT copies each module whose name ends with an entry of modules_to_save. "
            f"Use longer names there, name the FP8 modules in fp8_ignored_modules, {OFF}"
        )


def _why_not(name: str, layer: BaseTunerLayer, linears: Container[str]) -> str | None:
    """Return why an engine has no room for an adapter; None for plain LoRA on a linear layer of a decoder layer."""
    if not isinstance(layer, LoraLayer):
        return type(layer).__module__.split(".")[-2]  # PEFT's folder of the method
    if not isinstance(layer, LoraLinear):
        return type(layer).__name__
    if name not in linears:
        return "not a layer of a decoder"
    if name.endswith(MLA):
        # The engine decodes with separate parts of kv_b_proj. For batches of few rows, it computes the other
        # projections with a kernel that does not call the linear layers
        return "a projection of MLA, which an engine also computes without calling its linear layers"
    if name.endswith(".shared_expert_gate"):
        return "the gate of a shared expert, which every rank of an engine holds as a whole"
    if any(layer.lora_bias.values()):
        return "lora_bias=True"
    variants = list(layer.lora_variant.values())  # for example DoRA; plain LoRA has no variant
    return type(variants[0]).__name__ if variants else None
