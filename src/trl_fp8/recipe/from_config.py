"""The outline of a model from its config.json alone, for architectures whose shapes follow from it by a few rules.

The rules are those of transformers' modeling files; tests compare every outline with the model's own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .outline import Outline


# model type -> its class in transformers
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_HEAD_DIM_MUST_BE_GIVEN = ("qwen3", "qwen3_moe")  # the others divide hidden_size among the heads
_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def outline_of_config(config: Mapping[str, Any], name: str) -> Outline | None:
    """Outline of a checkpoint called `name`; None if its architecture is not one of `CLASSES`, or if its config.json
    leaves something to defaults that only transformers knows.
    """
    kind = config.get("model_type")
    wanted = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"}
    wanted |= {"vocab_size", "tie_word_embeddings"} | ({"head_dim"} if kind in _HEAD_DIM_MUST_BE_GIVEN else set())
    if kind == "qwen3_moe":
        wanted |= {"moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"}
    experts = config.get("num_local_experts", config.get("num_experts"))
    without = {key for key in wanted if config.get(key) is None}
    if kind not in CLASSES or without or (experts is None and kind in ("mixtral", "qwen3_moe")):
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    parameters = dict(_parameters(kind, config, head_dim, experts))
    projections = {key.removesuffix(".weight"): s for key, s in parameters.items() if key.endswith("_proj.weight")}
    return Outline(
        name=name,
        class_name=CLASSES[kind],
        architectures=tuple(config.get("architectures") or (CLASSES[kind],)),
        model_type=kind,
        layers=config["num_hidden_layers"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        parameters=parameters,
        linears=projections | {"lm_head": (config["vocab_size"], config["hidden_size"])},  # a module also where tied
        experts={key.rpartition(".")[0]: True for key in parameters if key.endswith(".experts.down_proj")},
    )


def _parameters(kind: str, config: Mapping[str, Any], head_dim: int, experts: int | None) -> _Shapes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn", kind, config, head_dim)
        if kind == "mixtral":
            yield f"{prefix}.mlp.gate.weight", (experts, hidden)
            yield from _experts(f"{prefix}.mlp.experts", experts, config["intermediate_size"], hidden)
        elif kind == "qwen3_moe" and _is_sparse(layer, config):
            yield from _experts(f"{prefix}.mlp.experts", experts, config["moe_intermediate_size"], hidden)
            yield f"{prefix}.mlp.gate.weight", (experts, hidden)
        else:
            yield from _dense(f"{prefix}.mlp", config)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def _attention(prefix: str, kind: str, config: Mapping[str, Any], head_dim: int) -> _Shapes:
    hidden, has_bias = config["hidden_size"], config.get("attention_bias", False)
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{prefix}.{name}.weight", (rows, hidden)
        if has_bias or kind == "qwen2":
            yield f"{prefix}.{name}.bias", (rows,)
    yield f"{prefix}.o_proj.weight", (hidden, queries)
    if has_bias:
        yield f"{prefix}.o_proj.bias", (hidden,)
    if kind in ("qwen3", "qwen3_moe"):
        yield f"{prefix}.q_norm.weight", (head_dim,)
        yield f"{prefix}.k_norm.weight", (head_dim,)


def _dense(prefix: str, config: Mapping[str, Any]) -> _Shapes:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (hidden, intermediate) if name == "down_proj" else (intermediate, hidden)
        yield f"{prefix}.{name}.weight", shape
        if config.get("mlp_bias", False):
            yield f"{prefix}.{name}.bias", shape[:1]


def _is_sparse(layer: int, config: Mapping[str, Any]) -> bool:
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


def _experts(prefix: str, experts: int, intermediate: int, hidden: int) -> _Shapes:
    yield f"{prefix}.gate_up_proj", (experts, 2 * intermediate, hidden)
    yield f"{prefix}.down_proj", (experts, hidden, intermediate)
