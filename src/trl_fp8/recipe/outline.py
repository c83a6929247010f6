"""`Outline`: names, shapes and caches of a model. A recipe decides from it what becomes FP8, and a plan counts bytes.

from_model.py creates outlines, with the caches from `layer_caches` here. This file imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class LayerCache:
    """Cache of a decoder layer for one sequence, while an engine generates."""

    # Cached elements of one token: k and v of all heads, or MLA's latent with its rotated key. 0: the layer caches no
    # tokens, perhaps because it reads the k and v of another layer
    elements: int = 0
    window: int | None = None  # the most tokens that sliding or chunked attention keeps; None: all tokens are kept
    is_latent: bool = False  # whether this is MLA's cache, which each tensor parallel rank holds whole
    # Bytes of a recurrent state, which does not grow with the sequence. Known for gated delta nets only, otherwise 0
    state_bytes: int = 0


@dataclass(frozen=True)
class Outline:
    """Outline of a model, without adapters. Names of tensors are the checkpoint's, in the model's order."""

    name: str  # name of the checkpoint, or of the class if there is no checkpoint
    class_name: str
    # Names by which vLLM finds its class: the config's `architectures`, or `class_name` if the config has none
    architectures: tuple[str, ...]
    config_type: str  # `model_type` of the whole config
    model_type: str  # `model_type` of the language model. Layers and heads below are the language model's, too
    layers: int
    heads: int  # attention heads; 0 if layers differ in their heads or have none
    kv_heads: int  # 0 if `heads` is 0
    head_dim: int  # 0 if `heads` is 0
    caches: tuple[LayerCache, ...] = field(repr=False)  # by decoder layer
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)  # shape of each parameter and each stored buffer
    linears: Mapping[str, tuple[int, int]] = field(repr=False)  # (out-features N, in-features K)
    # Name of each expert module -> True if its weights are gate_up_proj [E, 2I, K] and down_proj [E, K, I] (E experts,
    # I intermediate size, K hidden size). False: another layout, which stays in BF16
    experts: Mapping[str, bool] = field(repr=False)
    experts_per_token: int = 0  # number of experts that a router chooses; 0: a dense model
    top_k_routers: bool = False  # True: each router chooses experts by one top-k, which router_replay can replace
    context: int = 0  # max_position_embeddings of the config, in tokens; 0: unknown
    # Longrope: tokens of the longest sequence that uses the short factors of the rotary angles; 0: no limit
    short_factor_length: int = 0
    stretch: float = 1.0  # linear rotary scaling: an engine serves sequences up to `context * stretch` tokens
    activation: str = ""  # activation function of the MLPs; empty: unknown
    stored_as: str = ""  # quantization method of the checkpoint's own weights, e.g. "fp8"; empty: not quantized

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the numbers of the decoder layers that cache keys and values."""
        return kv_layers_of(self.caches)

    @property
    def decoder(self) -> str:
        """Return the name of the module that contains the decoder layers, e.g. `model` or `model.language_model`."""
        for name in self.parameters:
            if name.endswith(".embed_tokens.weight"):
                return name.removesuffix(".embed_tokens.weight")
        return "model"  # the embedding has another name


def layer_caches(config: Mapping[str, Any], layers: int, kv_heads: int, head_dim: int) -> tuple[LayerCache, ...]:
    """Return the cache of each decoder layer.

    `config` is a transformers config as a dictionary with all defaults (`to_dict()`).
    """
    window = None
    if config.get("use_sliding_window", True):
        window = config.get("sliding_window")
    full = LayerCache(2 * kv_heads * head_dim)
    latent_size = config.get("kv_lora_rank")
    if latent_size:
        full = LayerCache(latent_size + config["qk_rope_head_dim"], is_latent=True)
    cache_by_kind = {  # a kind that is missing here, such as "hybrid", caches k and v like full attention
        "sliding_attention": replace(full, window=window or None),
        "chunked_attention": replace(full, window=config.get("attention_chunk_size")),
        "linear_attention": LayerCache(state_bytes=_delta_net_bytes(config)),
        "conv": LayerCache(),
        "mlp": LayerCache(),  # Nemotron-H has layers that are only an MLP, or only experts
        "moe": LayerCache(),
    }
    kinds = config.get("layer_types")
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    without_cache = config.get("num_kv_shared_layers") or 0  # Gemma 3n's last layers read k and v of earlier layers
    with_cache = layers - without_cache
    caches = [cache_by_kind.get(kind, full) for kind in kinds[:with_cache]]
    caches += [LayerCache()] * without_cache
    return tuple(caches)


def kv_layers_of(caches: tuple[LayerCache, ...]) -> tuple[int, ...]:
    """Return the numbers of the decoder layers that cache keys and values."""
    return tuple(layer for layer, cache in enumerate(caches) if cache.elements)


def _delta_net_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of the state that vLLM keeps for a gated delta net (`gated_delta_net_state_shape`).

    The state has the last inputs of a convolution, in BF16, and for each head a matrix (key_dim x value_dim).
    """
    heads = config.get("linear_num_value_heads")
    if not heads:
        return 0
    key_dim = config["linear_key_head_dim"]
    value_dim = config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * key_dim + heads * value_dim
    convolution_bytes = 2 * channels * (config["linear_conv_kernel_dim"] - 1)
    matrix_itemsize = 4 if config.get("mamba_ssm_dtype") == "float32" else 2
    return convolution_bytes + matrix_itemsize * heads * key_dim * value_dim
