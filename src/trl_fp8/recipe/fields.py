"""Fields of a config.json: each is of use, or an error that names it. What is left out has transformers' default."""

import reprlib
from collections.abc import Mapping
from typing import Any

from .architectures import ARCHITECTURES, Architecture


_MOST_LAYERS, _MOST = 1000, 2**31 - 1  # beyond it is a mistake, which would take minutes and gigabytes
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MAY_BE_ZERO = ("first_k_dense_replace", "max_window_layers", "sliding_window")
_MAY_BE_NULL = ("num_key_value_heads", "q_lora_rank", "sliding_window")  # and whatever is null by default
_ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
Config = Mapping[str, Any]


def completed(config: Config, model_type: str, within: str = "") -> dict[str, Any]:
    """The fields of a text config that decide an outline, whatever else it has.

    Adds `experts`, their number under one name. Raises `ValueError`, which names a field after `within`.
    """
    architecture = ARCHITECTURES[model_type]
    found = dict(architecture.defaults)
    for key, default in architecture.defaults.items():
        alias = architecture.also_called
        given = alias if key in _EXPERTS and alias in config and key not in config else key
        if given in config:
            may_be_null, value = default is None or key in _MAY_BE_NULL, config[given]
            is_null = may_be_null and value is None
            found[key] = None if is_null else _checked(f"{within}{given}", value, key, found["num_hidden_layers"])
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = found["num_attention_heads"]
    if "kv_lora_rank" in found:
        found["head_dim"] = found["qk_rope_head_dim"]
    elif found["head_dim"] is None:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    if not found["head_dim"]:
        heads = found["num_attention_heads"]
        raise wrong(f"{within}num_attention_heads", heads, f"at most hidden_size={found['hidden_size']}")
    found["layer_types"] = found["layer_types"] or _layer_types(architecture, found)
    if "mlp_layer_types" in found and found["mlp_layer_types"] is None:
        found["mlp_layer_types"] = ["dense"] + ["sparse"] * (found["num_hidden_layers"] - 1)
    return found | {"experts": next((found[key] for key in _EXPERTS if key in found), 0)}


def longrope_tokens(config: Config) -> int:
    """Tokens up to which a model with longrope takes its factors for short sequences; 0: it has none."""
    rope = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return 0
    key = "original_max_position_embeddings"
    return _checked(key, config.get(key) or rope.get(key) or 4096, key, 0)


def is_stretched(config: Config) -> bool:
    """Whether rotary angles are scaled, so that sequences may be longer than `max_position_embeddings`."""
    rope = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    kinds = [part.get("rope_type", part.get("type")) for part in (rope, *rope.values()) if isinstance(part, Mapping)]
    return any(kind not in (None, "default") for kind in kinds)


def activation(config: Config) -> str:
    """Name of the function inside an MLP; empty if the config does not say."""
    found = config.get("hidden_activation") or config.get("hidden_act")  # Gemma's classes read the former first
    return found if isinstance(found, str) else ""


def mapping(config: Config, key: str) -> Config:
    """A field that is an object of JSON; empty where it is null or not there."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise wrong(key, value, "an object")
    return value or {}


def text(config: Config, key: str, default: str | None, within: str = "") -> str:
    """A field that is a string; without a default it has to be there."""
    value = config.get(key, default)
    if not isinstance(value, str):
        raise wrong(f"{within}{key}", value, "a string")
    return value


def texts(config: Config, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """A field that is a list of strings; `default` where it is null, empty, or not there."""
    value = config.get(key)
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)):
        raise wrong(key, value, "a list of strings")
    return tuple(value or default)


def truth(config: Config, key: str, default: bool) -> bool:
    """A field that is true or false; `default` where it is not there."""
    return _checked(key, config[key], key, 0) if key in config else default


def wrong(key: str, value: Any, wanted: str) -> ValueError:
    """The error of a field."""
    huge = isinstance(value, int) and value.bit_length() > 256
    shown = "a number of hundreds of digits" if huge else reprlib.repr(value)
    return ValueError(f"config.json: {key}={shown}, where {wanted} is wanted.")


def _checked(name: str, value: Any, key: str, layers: int) -> Any:
    """`value` if it is one of the field `key`, in a model of so many layers."""
    if key == "layer_types":
        is_list = isinstance(value, list | tuple) and all(isinstance(kind, str) for kind in value)
        if is_list and len(value) == layers and set(value) <= set(_ATTENTIONS):
            return list(value)
        raise wrong(name, value, f"a list of num_hidden_layers={layers} names out of {', '.join(_ATTENTIONS)}")
    if key == "mlp_layer_types":
        if isinstance(value, list | tuple) and len(value) == layers and set(map(str, value)) <= {"dense", "sparse"}:
            return list(value)
        raise wrong(name, value, f"a list of num_hidden_layers={layers} words out of dense, sparse")
    if key == "mlp_only_layers":
        if isinstance(value, list | tuple) and all(_is_whole(layer) for layer in value):
            return list(value)
        raise wrong(name, value, "a list of numbers of layers")
    if key.startswith(("tie_", "use_")) or key.endswith("_bias"):
        if isinstance(value, bool):
            return value
        raise wrong(name, value, "true or false")
    if key.endswith("_dtype"):
        if isinstance(value, str):
            return value
        raise wrong(name, value, "the name of a dtype")
    least, most = int(key not in _MAY_BE_ZERO), _MOST_LAYERS if key == "num_hidden_layers" else _MOST
    if _is_whole(value) and least <= value <= most:
        return value
    raise wrong(name, value, f"a whole number from {least} to {most}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _layer_types(architecture: Architecture, found: Config) -> list[str] | None:
    """What the config classes of transformers put for null; None: the attention of all layers is alike."""
    every = architecture.full_every
    every = found[every] if isinstance(every, str) else every
    other = "linear_attention" if architecture.linear else "sliding_attention"
    layers, bound = range(found["num_hidden_layers"]), found.get("max_window_layers")
    if bound is not None and not (found["use_sliding_window"] and found["sliding_window"]):
        return ["full_attention" for layer in layers]
    if every:
        last = len(layers) if bound is None else bound
        return [other if (layer + 1) % every and layer < last else "full_attention" for layer in layers]
    return None if bound is None else [other if layer >= bound else "full_attention" for layer in layers]
