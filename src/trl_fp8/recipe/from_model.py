"""The outline of a transformers or PEFT model; meta and sharded parameters are fine."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from .experts import expert_modules
from .names import TRANSFORMERS, checkpoint_name, full_shape
from .outline import Outline


def outline_of(model: nn.Module) -> Outline:
    """Names and shapes of a causal LM."""
    text = model.config.get_text_config()
    class_name = type(model.get_base_model() if is_peft_model(model) else model).__name__
    kv_heads, head_dim = _heads(text)
    of_adapter = _adapter_names(model)
    named = {checkpoint_name(name): parameter for name, parameter in model.named_parameters() if not of_adapter(name)}
    named |= persistent_buffers(model)
    return Outline(
        name=model.config.name_or_path or class_name,
        class_name=class_name,
        architectures=tuple(model.config.architectures or (class_name,)),
        model_type=text.model_type,
        layers=text.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        parameters={name: full_shape(parameter) for name, parameter in named.items()},
        linears={name: (linear.out_features, linear.in_features) for name, linear in linear_layers(model)},
        experts={name: _has_usual_layout(module) for name, module in expert_modules(model)},
    )


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers by checkpoint name. PEFT's wrappers are looked through, its adapters left out."""
    of_adapter = _adapter_names(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not of_adapter(name):
            yield checkpoint_name(name), module


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that checkpoints hold, by checkpoint name, e.g. the routers' `e_score_correction_bias` of DeepSeek-V3.

    They are updated like parameters, though by no gradient, and keep their dtype in an engine.
    """
    of_adapter = _adapter_names(model)
    for prefix, module in model.named_modules():
        if type(module).__module__.startswith("peft."):  # VeRA's projections
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not of_adapter(f"{prefix}.{name}"):
                yield checkpoint_name(f"{prefix}.{name}"), buffer


def _heads(text: Any) -> tuple[int, int]:
    """(KV heads, head size); (0, 0) where layers differ in them or have none."""
    try:
        heads = getattr(text, "num_attention_heads", 0)
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return (kv_heads, getattr(text, "head_dim", None) or text.hidden_size // heads) if heads else (0, 0)
    except RuntimeError:  # transformers 5.17 refuses to name one value where layers have several
        return 0, 0


def _adapter_names(model: nn.Module) -> Callable[[str], bool]:
    """Tells what TRL's sync leaves out: names with the prefix of a PEFT method, and copies of whole modules that are
    not active (PEFT's original, and TRL's reference).
    """
    prefix = getattr(model, "prefix", "lora_")

    def of_adapter(name: str) -> bool:
        return f".{prefix}" in f".{name}" or "original_module" in name or ".modules_to_save." in checkpoint_name(name)

    return of_adapter


def _has_usual_layout(experts: nn.Module) -> bool:
    """transformers marks experts that are stored transposed, or with gate and up interleaved."""
    named = sorted(name for name, _ in experts.named_parameters(recurse=False))
    odd = getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True)
    return named == sorted(TRANSFORMERS.fused) and not odd
