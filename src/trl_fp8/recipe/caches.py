"""What each decoder layer of an engine keeps of a sequence, from the fields of a text config that say so."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LayerCache:
    """What a decoder layer keeps of a sequence while an engine generates."""

    elements: int = 0  # of a token: k and v of all heads, or MLA's latent; 0: none, or those of another layer
    window: int | None = None  # sliding attention keeps this many tokens at most
    is_latent: bool = False  # MLA: every tensor parallel rank holds all of it
    state_bytes: int = 0  # of a sequence of whatever length: gated delta nets in BF16; of other such layers not known


def layer_caches(config: Mapping[str, Any], layers: int, kv_heads: int, head_dim: int) -> tuple[LayerCache, ...]:
    """By decoder layer; `config` has transformers' defaults filled in, as `to_dict()` has them."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    full = LayerCache(2 * kv_heads * head_dim)
    if rank := config.get("kv_lora_rank"):
        full = LayerCache(rank + config["qk_rope_head_dim"], is_latent=True)
    of_kind = {
        "sliding_attention": replace(full, window=window or None),
        "chunked_attention": replace(full, window=config.get("attention_chunk_size")),
        "linear_attention": LayerCache(state_bytes=_delta_net_bytes(config)),
        "conv": LayerCache(),
        **dict.fromkeys(("mlp", "moe"), LayerCache()),  # Nemotron-H: layers of nothing else
    }
    kinds = config.get("layer_types") or ("sliding_attention" if window else "full_attention",) * layers
    own = layers - (config.get("num_kv_shared_layers") or 0)  # Gemma 3n: the last ones read k and v of earlier ones
    return tuple(of_kind.get(kind, full) if layer < own else LayerCache() for layer, kind in enumerate(kinds))


def kv_layers(caches: tuple[LayerCache, ...]) -> tuple[int, ...]:
    """Numbers of the decoder layers that cache keys and values."""
    return tuple(layer for layer, cache in enumerate(caches) if cache.elements)


def _delta_net_bytes(config: Mapping[str, Any]) -> int:
    """vLLM's `gated_delta_net_state_shape`: the last inputs of the convolution, and a K x V matrix of each head."""
    if not (heads := config.get("linear_num_value_heads")):
        return 0
    keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * keys + heads * values
    matrix_bytes = 4 if config.get("mamba_ssm_dtype") == "float32" else 2
    return 2 * channels * (config["linear_conv_kernel_dim"] - 1) + matrix_bytes * heads * keys * values
