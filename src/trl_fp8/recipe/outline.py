"""What a model consists of, without the model: names and shapes, enough to decide what is FP8 and to count bytes.

Whatever works on an outline imports neither torch nor transformers, which take three and seven seconds on two slow
cores. It comes from a model (`from_model.py`), or, for the architectures of `architectures.py`, from a config.json
alone; tests compare every such outline with the model's own.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .architectures import ARCHITECTURES, WRAPPERS, Architecture, Rows, Wrapper
from .caches import LayerCache, kv_layers, layer_caches
from .fields import Config, activation, completed, is_stretched, longrope_tokens, mapping, text, texts, truth, wrong


_LINEAR = re.compile(r"(proj(_\w+)?|\.shared_expert_gate)\.weight$")
_TERM = re.compile(r"(\d*)([A-Z]?)")
_Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Outline:
    """Names are those of the checkpoint, in the order of the model; adapters are left out."""

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
    context: int = 0  # tokens of the longest sequence that the config promises; 0: it does not say
    turned_alike: int = 0  # tokens of a sequence beyond which other factors turn its q and k (longrope); 0: any
    is_stretched: bool = False  # rotary angles are scaled for sequences longer than `context`
    activation: str = ""  # inside an MLP; empty: the config does not say
    stored_as: str = ""  # quantization method of the checkpoint itself, e.g. "fp8"; empty: none
    is_text_only: bool = False  # a vision tower, which the model has, is not in `parameters`

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers that cache keys and values."""
        return kv_layers(self.caches)

    @property
    def decoder(self) -> str:
        """The module that has the decoder layers; of a vision-language model it lies deeper."""
        name = next((name for name in self.parameters if name.endswith(".embed_tokens.weight")), "model.")
        return name.removesuffix("embed_tokens.weight").removesuffix(".")


def outline_of_config(config: Any, name: str) -> Outline | None:
    """None if the architecture is none of those that are known. `config` is what a config.json holds, of any JSON.

    Raises:
        ValueError: A field has a value of no use. The message names it and what is wanted.
    """
    if not isinstance(config, Mapping):
        raise wrong("its content", config, "an object")
    kind = text(config, "model_type", "")
    wrapper = WRAPPERS.get(kind)
    kind, own, within = _language_model(config, wrapper) if wrapper else (kind, config, "")
    architecture = ARCHITECTURES.get(kind)
    if architecture is None or not (wrapper or architecture.class_name):
        return None
    fields = completed(own, kind, within)
    if wrapper:
        fields["tie_word_embeddings"] = truth(config, "tie_word_embeddings", wrapper.tied)
    class_name = (wrapper or architecture).class_name
    layers, kv_heads, head_dim = (fields[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    parameters = dict(_parameters(architecture, fields, "model.language_model" if wrapper else "model"))
    experts = [key.rpartition(".")[0] for key in parameters if key.endswith(".experts.down_proj")]
    linears = {key.removesuffix(".weight"): shape for key, shape in parameters.items() if _LINEAR.search(key)}
    quantization = mapping(config, "quantization_config")
    return Outline(
        name=name,
        class_name=class_name,
        architectures=texts(config, "architectures", (class_name,)),
        config_type=text(config, "model_type", ""),
        model_type=kind,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        caches=layer_caches(fields, layers, kv_heads, head_dim),
        parameters=parameters,
        linears=linears | {"lm_head": (fields["vocab_size"], fields["hidden_size"])},  # a module also where tied
        experts={key: f"{key}.down_proj_bias" not in parameters for key in experts},  # gpt-oss has them transposed
        experts_per_token=fields["num_experts_per_tok"] or 0 if experts else 0,
        context=fields["max_position_embeddings"],
        turned_alike=longrope_tokens(own),
        is_stretched=is_stretched(own),
        activation=activation(own),
        stored_as=text(quantization, "quant_method", None, "quantization_config.") if quantization else "",
        is_text_only=wrapper is not None,
    )


def _language_model(config: Config, wrapper: Wrapper) -> tuple[str, Config, str]:
    """(model type, its fields, what they are within) of the language model in a vision-language model."""
    if own := mapping(config, "text_config"):
        return text(own, "model_type", wrapper.language_model, "text_config."), own, "text_config."
    if "hidden_size" in config:  # Qwen2.5-VL: beside the fields of the whole
        return wrapper.language_model, config, ""
    raise wrong("text_config", None, "an object")


def _parameters(architecture: Architecture, fields: Config, prefix: str) -> _Shapes:
    sizes, layers = _sizes(fields), range(fields["num_hidden_layers"])
    sparse = _sparse_layers(architecture, fields)
    linear = {layer for layer in layers if architecture.linear and fields["layer_types"][layer] == "linear_attention"}
    alike = {}  # layers that are: (linear, sparse) -> names and shapes
    yield f"{prefix}.embed_tokens.weight", (sizes["V"], sizes["H"])
    for layer in layers:
        if (kind := (layer in linear, layer in sparse)) not in alike:
            attention = architecture.linear if kind[0] else architecture.attention
            mlp = architecture.sparse if kind[1] else architecture.dense
            alike[kind] = list(_shapes((*attention, *mlp, *architecture.norms), fields, sizes))
        yield from ((f"{prefix}.layers.{layer}.{name}", shape) for name, shape in alike[kind])
    yield f"{prefix}.norm.weight", (sizes["H"],)
    if not fields["tie_word_embeddings"]:
        yield "lm_head.weight", (sizes["V"], sizes["H"])
    buffers = list(_shapes(architecture.buffers, fields, sizes))
    yield from ((f"{prefix}.layers.{layer}.{name}", shape) for layer in sorted(sparse) for name, shape in buffers)


def _sparse_layers(architecture: Architecture, fields: Config) -> set[int]:
    """Numbers of the layers with experts."""
    first, step = fields.get("first_k_dense_replace", 0), fields.get("decoder_sparse_step", 1)
    if "mlp_layer_types" in fields:
        return {layer for layer, kind in enumerate(fields["mlp_layer_types"]) if kind == "sparse"}
    layers = (layer for layer in range(first, fields["num_hidden_layers"]) if (layer + 1) % step == 0)
    return set(layers).difference(fields.get("mlp_only_layers") or ()) if architecture.sparse else set()


def _shapes(rows: Rows, fields: Config, sizes: Mapping[str, int]) -> _Shapes:
    """Names and shapes that rows of an `Architecture` stand for."""
    for row in rows:
        name, *words = row.split()
        conditions = dict(word.split("=") for word in words if "=" in word)
        if not fields.get(conditions.get("if"), True) or fields.get(conditions.get("unless")):
            continue
        shape = tuple(_size(word, sizes) for word in words if "=" not in word)
        yield name, shape
        if (bias := conditions.get("bias")) == "always" or fields.get(bias):
            yield f"{name.removesuffix('.weight')}.bias", shape[:1]


def _size(term: str, sizes: Mapping[str, int]) -> int:
    """`2X+Y` with sizes in the place of letters."""
    factors = (_TERM.fullmatch(part).groups() for part in term.split("+"))
    return sum(int(number or 1) * (sizes[letter] if letter else 1) for number, letter in factors)


def _sizes(fields: Config) -> dict[str, int]:
    """The letters of `architectures.py`."""
    get = fields.get
    heads, key_heads, head_dim = fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]
    expert = get("moe_intermediate_size", fields["intermediate_size"])
    sizes = {
        "H": fields["hidden_size"],
        "I": fields["intermediate_size"],
        "V": fields["vocab_size"],
        "A": heads,
        "D": head_dim,
        "Q": heads * head_dim,
        "K": key_heads * head_dim,
        "G": key_heads,
        "E": fields["experts"],
        "M": expert,
        "S": get("shared_expert_intermediate_size") or get("n_shared_experts", 0) * expert,
    }
    if "kv_lora_rank" in fields:
        plain, values = fields["qk_nope_head_dim"], fields["v_head_dim"]
        sizes |= {"L": get("q_lora_rank"), "R": fields["kv_lora_rank"], "P": head_dim, "O": heads * values}
        sizes |= {"Q": heads * (plain + head_dim), "U": heads * (plain + values)}
    if "linear_num_value_heads" in fields:
        heads, width = fields["linear_num_value_heads"], fields["linear_value_head_dim"]
        sizes |= {"X": fields["linear_num_key_heads"] * fields["linear_key_head_dim"], "Y": heads * width}
        sizes |= {"Z": heads, "W": width, "C": fields["linear_conv_kernel_dim"]}
    return sizes
