"""What a model consists of, without the model: names and shapes, enough to decide what is FP8 and to count bytes.

Whatever works on an outline imports neither torch nor transformers, which take three and seven seconds on two slow
cores. It comes from a model (`from_model.py`), or from a config.json alone for architectures whose shapes follow from
it by a few rules, those of transformers' modeling files; tests compare every such outline with the model's own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


# model type -> its class in transformers
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_QWEN3 = ("qwen3", "qwen3_moe")
_Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class LayerCache:
    """What a decoder layer keeps of a sequence while an engine generates."""

    elements: int = 0  # of a token: k and v of all heads, or MLA's latent; 0: none, or those of another layer
    window: int | None = None  # sliding attention keeps this many tokens at most
    is_latent: bool = False  # MLA: every tensor parallel rank holds all of it
    state_bytes: int = 0  # of linear attention, state-space and convolution layers: of a sequence of whatever length


@dataclass(frozen=True)
class Outline:
    """Names are those of the checkpoint, in the order of the model; adapters are left out."""

    name: str  # of the checkpoint, or of the class where there is none
    class_name: str
    architectures: tuple[str, ...]  # what vLLM looks up: the config's, or the class where it has none
    model_type: str  # of the language model, as are layers and heads
    layers: int
    kv_heads: int  # 0 where layers differ in their heads or have none
    head_dim: int  # 0 where kv_heads is
    caches: tuple[LayerCache, ...] = field(repr=False)  # by decoder layer
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)  # shapes, also of buffers that a checkpoint holds
    linears: Mapping[str, tuple[int, int]] = field(repr=False)  # (out-features N, in-features K)
    experts: Mapping[str, bool] = field(repr=False)  # True: gate_up_proj [E, 2I, K] and down_proj [E, K, I]


def outline_of_config(config: Mapping[str, Any], name: str) -> Outline | None:
    """None if the architecture is not one of `CLASSES`, or if the config leaves a default to transformers."""
    kind = config.get("model_type")
    wanted = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"}
    wanted |= {"vocab_size", "tie_word_embeddings"}
    if kind in _QWEN3:
        wanted.add("head_dim")  # the others divide hidden_size among the heads
    if kind == "qwen3_moe":
        wanted |= {"moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"}
    experts = config.get("num_local_experts", config.get("num_experts"))
    complete = all(config.get(key) is not None for key in wanted)
    if kind not in CLASSES or not complete or (experts is None and kind in ("mixtral", "qwen3_moe")):
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    parameters = dict(_parameters(kind, config, head_dim, experts))
    cache = LayerCache(2 * config["num_key_value_heads"] * head_dim)
    projections = {key.removesuffix(".weight"): s for key, s in parameters.items() if key.endswith("_proj.weight")}
    return Outline(
        name=name,
        class_name=CLASSES[kind],
        architectures=tuple(config.get("architectures") or (CLASSES[kind],)),
        model_type=kind,
        layers=config["num_hidden_layers"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        caches=(cache,) * config["num_hidden_layers"],
        parameters=parameters,
        linears=projections | {"lm_head": (config["vocab_size"], config["hidden_size"])},  # a module also where tied
        experts={key.rpartition(".")[0]: True for key in parameters if key.endswith(".experts.down_proj")},
    )


def _parameters(kind: str, config: Mapping[str, Any], head_dim: int, experts: int | None) -> _Shapes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        sparse = kind == "qwen3_moe" and layer not in config["mlp_only_layers"]
        yield from _attention(f"{prefix}.self_attn", kind, config, head_dim)
        if kind == "mixtral":
            yield f"{prefix}.mlp.gate.weight", (experts, hidden)
            yield from _experts(f"{prefix}.mlp.experts", experts, config["intermediate_size"], hidden)
        elif sparse and (layer + 1) % config["decoder_sparse_step"] == 0:
            yield from _experts(f"{prefix}.mlp.experts", experts, config["moe_intermediate_size"], hidden)
            yield f"{prefix}.mlp.gate.weight", (experts, hidden)
        else:
            intermediate, bias = config["intermediate_size"], config.get("mlp_bias", False)
            yield from _linear(f"{prefix}.mlp.gate_proj", intermediate, hidden, bias)
            yield from _linear(f"{prefix}.mlp.up_proj", intermediate, hidden, bias)
            yield from _linear(f"{prefix}.mlp.down_proj", hidden, intermediate, bias)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def _attention(prefix: str, kind: str, config: Mapping[str, Any], head_dim: int) -> _Shapes:
    hidden, has_bias = config["hidden_size"], config.get("attention_bias", False)
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"{prefix}.{name}", rows, hidden, has_bias or kind == "qwen2")
    yield from _linear(f"{prefix}.o_proj", hidden, queries, has_bias)
    if kind in _QWEN3:
        yield f"{prefix}.q_norm.weight", (head_dim,)
        yield f"{prefix}.k_norm.weight", (head_dim,)


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> _Shapes:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def _experts(prefix: str, experts: int, intermediate: int, hidden: int) -> _Shapes:
    yield f"{prefix}.gate_up_proj", (experts, 2 * intermediate, hidden)
    yield f"{prefix}.down_proj", (experts, hidden, intermediate)
