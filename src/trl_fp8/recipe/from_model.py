"""`outline_of` and `outline_of_pretrained`: the outline of a model, or of a checkpoint by its config alone.

A model is one of transformers or PEFT. Its parameters may be on the meta device, or sharded.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import transformers
from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import meta_device_safe_creation_ops

from .names import TRANSFORMERS, checkpoint_name, expert_modules, expert_weights, full_shape, is_router, routers
from .outline import LayerCache, Outline, layer_caches


def outline_of_pretrained(model: str, revision: str | None = None) -> Outline:
    """Return the outline of the folder or Hub id `model`. Only its config is read.

    The model is of the class that the config names, as TRL loads it, with a vision tower if it has one. It is built on
    the meta device, which takes a tenth of a second for 600 B parameters.

    Raises:
        ValueError: transformers builds no model of this config. The message names the model and transformers' error.
        OSError: There is no config in the folder, or the Hub cannot be reached.
    """
    try:
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
        class_name = config.architectures[0] if config.architectures else ""
        model_class = getattr(transformers, class_name, None)
        with torch.device("meta"), meta_device_safe_creation_ops():  # as from_pretrained builds a model
            if model_class:
                empty = model_class(config)
            else:
                empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return outline_of(empty)
    except OSError:
        raise
    except Exception as error:  # of any kind: nothing checks a config's fields before transformers uses them
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"transformers makes no causal language model of {model!r} ({type(error).__name__}: {reason}). Check its "
            "config.json."
        ) from error


def outline_of(model: nn.Module) -> Outline:
    """Return the outline of a causal LM, also on the meta device, sharded, or wrapped by PEFT."""
    text = model.config.get_text_config()
    # `rope_parameters` are the parameters of all layers, or a dictionary: kind of layers -> their parameters
    config_rope = getattr(text, "rope_parameters", None) or {}
    candidates = [config_rope] if "rope_type" in config_rope else config_rope.values()
    ropes = [rope for rope in candidates if isinstance(rope, dict) and "rope_type" in rope]
    linear_factors = [rope["factor"] for rope in ropes if rope["rope_type"] == "linear"]
    longropes = [rope for rope in ropes if rope["rope_type"] == "longrope"]
    base = model.get_base_model() if is_peft_model(model) else model
    class_name = type(base).__name__
    heads, kv_heads, head_dim = _heads(text)
    tensors = {}
    for name, parameter in model.named_parameters():
        if not of_adapter(name, model):
            tensors[checkpoint_name(name)] = parameter
    tensors |= persistent_buffers(model)
    tensors |= _shared_weights(model)
    experts = {name: _has_usual_layout(module) for name, module in expert_modules(model)}
    return Outline(
        name=model.config.name_or_path or class_name,
        class_name=class_name,
        architectures=tuple(model.config.architectures or (class_name,)),
        config_type=model.config.model_type,
        model_type=text.model_type,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        caches=caches_of(text),
        parameters={name: full_shape(parameter) for name, parameter in tensors.items()},
        linears={name: (linear.out_features, linear.in_features) for name, linear in linear_layers(model)},
        experts=experts,
        experts_per_token=(getattr(text, "num_experts_per_tok", None) or 0) if experts else 0,
        top_k_routers=bool(experts) and all(map(is_router, routers(base).values())),
        context=getattr(text, "max_position_embeddings", None) or 0,
        # A longrope config always has this key in rope_parameters: transformers sets it there when it loads the config
        short_factor_length=min((rope["original_max_position_embeddings"] for rope in longropes), default=0),
        # vLLM multiplies max_position_embeddings by this factor. Gemma 3 is an exception: its max_position_embeddings
        # includes the factor already
        stretch=1.0 if "gemma3" in text.model_type else max(linear_factors, default=1.0),
        activation=getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None) or "",
        stored_as=_stored_as(model.config),
    )


def caches_of(text: Any, **fields: Any) -> tuple[LayerCache, ...]:
    """Return the cache of each decoder layer of a text config. `fields` replace fields of the config."""
    # `to_dict` leaves out Jamba's layer_types, which are a property
    config = text.to_dict() | {"layer_types": getattr(text, "layer_types", None)}
    _, kv_heads, head_dim = _heads(text)
    return layer_caches(config | fields, text.num_hidden_layers, kv_heads, head_dim)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield linear layers by checkpoint name, also those inside PEFT's wrappers, but not PEFT's adapters."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not of_adapter(name, model):
            yield checkpoint_name(name), module


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield checkpoint name and tensor of each buffer that checkpoints store, e.g. `e_score_correction_bias` of
    DeepSeek-V3's routers.

    Training updates these buffers, although not by gradients, so a sync sends them like parameters. They keep their
    dtype in an engine.
    """
    for prefix, module in model.named_modules():
        if type(module).__module__.startswith("peft."):  # VeRA's projections
            continue
        for name, buffer in module.named_buffers(prefix, recurse=False):
            own_name = name.rpartition(".")[2]
            is_persistent = own_name not in module._non_persistent_buffers_set
            if is_persistent and not of_adapter(name, model):
                yield checkpoint_name(name), buffer


def of_adapter(name: str, model: nn.Module) -> bool:
    """Return whether a module or parameter belongs to an adapter, or is an untrained original or copy.

    With `modules_to_save` PEFT keeps the untrained original of a module beside its trained copy, and TRL adds a copy
    for its adapter "ref". A sync sends only the trained copy.
    """
    prefix = getattr(model, "prefix", "lora_")  # begins the names of the PEFT method's tensors
    # `checkpoint_name` removes ".modules_to_save.default", which marks the trained copy. If a part ".modules_to_save."
    # is left, the name belongs to the copy of another adapter
    is_untrained = "original_module" in name or ".modules_to_save." in checkpoint_name(name)
    return is_untrained or f".{prefix}" in f".{name}"


def _shared_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of linears and experts that only the engine has (features/shared_base). The policy's modules
    have placeholders for these weights, as attributes and not as parameters.
    """
    linears = ((name, linear, ["weight"]) for name, linear in linear_layers(model))
    experts = ((name, module, expert_weights(module)) for name, module in expert_modules(model))
    for name, module, attributes in chain(linears, experts):
        parameters = dict(module.named_parameters(recurse=False))
        for attribute in attributes:
            if attribute not in parameters:
                yield f"{name}.{attribute}", getattr(module, attribute)


def _heads(text: Any) -> tuple[int, int, int]:
    """Return (attention heads, KV heads, head size); zeros if layers differ in them, or have no heads."""
    try:
        heads = getattr(text, "num_attention_heads", 0)
        if not heads:
            return 0, 0, 0
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return heads, kv_heads, head_dim
    except RuntimeError:  # raised by transformers 5.17 if layers have different values
        return 0, 0, 0


def _stored_as(config: Any) -> str:
    """Return the quantization method of a config, or "" if the checkpoint is not quantized."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return ""
    # After from_pretrained has loaded a model, its config has an object in place of the dictionary
    method = quantization.get("quant_method", "") if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method))  # the method may be an Enum


def _has_usual_layout(experts: nn.Module) -> bool:
    """Return whether experts are `gate_up_proj` `[E, 2I, K]`, gate before up, and `down_proj` `[E, K, I]`."""
    if sorted(expert_weights(experts)) != sorted(TRANSFORMERS.fused):
        return False
    # transformers marks other layouts by these two attributes
    is_transposed = getattr(experts, "is_transposed", False)
    is_interleaved = not getattr(experts, "is_concatenated", True)
    return not (is_transposed or is_interleaved)
