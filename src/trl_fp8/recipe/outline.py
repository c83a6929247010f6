"""Names, shapes and caches of a model, enough to decide what is FP8 and to count bytes; made by `from_model.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class LayerCache:
    """Cache that a decoder layer keeps for a sequence while an engine generates."""

    elements: int = 0  # of a token: k and v of all heads, or MLA's latent; 0: none, or those of another layer
    window: int | None = None  # sliding attention keeps this many tokens at most
    is_latent: bool = False  # MLA: every tensor parallel rank holds all of it
    state_bytes: int = 0  # of a sequence of whatever length: gated delta nets in BF16; of other such layers not known


@dataclass(frozen=True)
class Outline:
    """Outline of a model, without adapters. Names are those of the checkpoint, in the order of the model."""

    name: str  # of the checkpoint, or of the class where there is none
    class_name: str
    architectures: tuple[str, ...]  # what vLLM looks up: the config's, or the class where it has none
    config_type: str  # model_type of the config as a whole
    model_type: str  # of the language model, as are layers and heads
    layers: int
    kv_heads: int  # 0 where layers differ in their heads or have none
    head_dim: int  # 0 where kv_heads is
    caches: tuple[LayerCache, ...] = field(repr=False)  # by decoder layer
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)  # shapes, also of buffers that a checkpoint holds
    linears: Mapping[str, tuple[int, int]] = field(repr=False)  # (out-features N, in-features K)
    experts: Mapping[str, bool] = field(repr=False)  # True: gate_up_proj [E, 2I, K] and down_proj [E, K, I]
    experts_per_token: int = 0  # that a router chooses; 0: dense
    top_k_routers: bool = False  # its routers choose experts by one top-k, whose choice router_replay can replace
    context: int = 0  # tokens of the longest sequence that the config promises; 0: it does not say
    turned_alike: int = 0  # tokens of a sequence beyond which other factors turn its q and k (longrope); 0: any
    stretch: float = 1.0  # an engine serves sequences of `context` times this (linear scaling of rotary angles)
    activation: str = ""  # inside an MLP; empty: the config does not say
    stored_as: str = ""  # quantization method of the checkpoint itself, e.g. "fp8"; empty: none

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the numbers of the decoder layers that cache keys and values."""
        return kv_layers(self.caches)

    @property
    def decoder(self) -> str:
        """Return the name of the module that has the decoder layers; deeper in a vision-language model."""
        name = next((name for name in self.parameters if name.endswith(".embed_tokens.weight")), "model.")
        return name.removesuffix("embed_tokens.weight").removesuffix(".")


def layer_caches(config: Mapping[str, Any], layers: int, kv_heads: int, head_dim: int) -> tuple[LayerCache, ...]:
    """Return the cache of each decoder layer; `config` has transformers' defaults, as `to_dict()` fills them in."""
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
    """Return the numbers of the decoder layers that cache keys and values."""
    return tuple(layer for layer, cache in enumerate(caches) if cache.elements)


def _delta_net_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of vLLM's `gated_delta_net_state_shape`: a convolution's last inputs, a K x V matrix a head."""
    heads = config.get("linear_num_value_heads")
    if not heads:
        return 0
    keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * keys + heads * values
    matrix_bytes = 4 if config.get("mamba_ssm_dtype") == "float32" else 2
    return 2 * channels * (config["linear_conv_kernel_dim"] - 1) + matrix_bytes * heads * keys * values
