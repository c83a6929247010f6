"""The table of model types: one row each, and the only place that names them.

The key of a row is the `model_type` of transformers' config. A vision-language model has two rows. The row of the
whole config says whether the type was tested and how it is exported; that of the language model says everything else.
`_ROWS` describe vLLM 0.31, the version with the most model classes; `FAMILIES` are the rows for the installed version.
`tests/engine/test_servable.py` compares them with vLLM's classes, `tests/recipe/test_families.py` with transformers'.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trl_fp8.upstream.versions import VLLM, installed_vllm


Config = Mapping[str, Any]  # `to_dict()` of a language model's config
Fields = dict[str, Any]
Parts = tuple[tuple[str, str], ...]  # (part of a name, its replacement), applied in this order


@dataclass(frozen=True)
class Family:
    """Properties of a model type. The defaults are those of most types."""

    tested: bool = True  # tiny policies of this type went through a whole run (testing/matrix)
    # Why no engine can serve this type; empty if an engine can. `servable.py` refuses more types, by parameters' names
    refused: str = ""
    by_transformers: bool = False  # vLLM has no class of its own and serves it by transformers' modeling code
    # vLLM's class computes only these activations. For others it raises, or silently computes SiLU. Empty: any
    activations: tuple[str, ...] = ()
    one_window: bool = False  # vLLM's class gives all layers one sliding window, or none
    sees_images_whole: bool = False  # tokens of an image attend to all of it, which FlashAttention 3 cannot mask
    sinks: bool = False  # its attention may have sinks
    stored: Parts = ()  # transformers' names -> the checkpoint's names, where loading in transformers changes names
    in_engine: Parts = ()  # the checkpoint's names -> the names of modules in vLLM's class
    # Suffixes of the weights (in transformers' names) that vLLM's class holds in FP32, as checkpoints do
    fp32: tuple[str, ...] = ()
    experts_together: bool = False  # published checkpoints have the experts of a layer in one tensor
    experts_counted: bool = True  # False: its config has no num_experts, which TRL's load-balancing loss reads
    fuses_unsaid: bool = False  # vLLM's class fuses layers but does not list them (has no packed_modules_mapping)
    # While vLLM loads, it renames `weight_scale_inv` to the name of per-tensor scales, so it cannot read blocks
    scales_renamed: bool = False
    followed: bool = False  # a trainer can compute its layers with the engine's operations (one_forward)
    # Operations that vLLM's class itself compiles on CUDA, so that no trainer can call them. The words stand in the
    # error "vLLM compiles its ..., so the trainer cannot get the same bits"
    compiled_on_cuda: str = ""
    engine_fields: Callable[[Config], Fields] = lambda config: {}  # config -> fields that vLLM needs in it


# `engine_fields`: vLLM's classes read these fields of a config, and transformers' classes ignore them. Checkpoints of
# the Hub have the right values, but a config made in memory may lack them or contradict them. The policy's class is
# transformers', and each function below returns the values that make vLLM compute the same. Without `moe_router_dtype`
# vLLM would round the routers' logits to BF16.


def _afmoe(config: Config) -> Fields:
    return {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def _deepseek_v2(config: Config) -> Fields:
    one_group = {"n_group": 1, "topk_group": 1} if config.get("topk_method") == "greedy" else {}
    return one_group | {"scoring_func": "softmax", "norm_topk_prob": False, "moe_router_dtype": "float32"}


def _deepseek_v3(config: Config) -> Fields:
    _require_interleaved(config)
    return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_router_dtype": "float32"}


def _glm4_moe_lite(config: Config) -> Fields:
    _require_interleaved(config)
    return {"first_k_dense_replace": _dense_layers(config)}


def _hy_v3(config: Config) -> Fields:
    fields = {"qk_norm": True, "route_norm": True, "expert_hidden_dim": config["moe_intermediate_size"]}
    return fields | {"first_k_dense_replace": _dense_layers(config)}


def _minimax_m2(config: Config) -> Fields:
    rotated = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) * config["head_dim"]
    return {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": int(rotated)}


def _dense_layers(config: Config) -> int:
    """Return the number of layers before the first one with experts."""
    types = config["mlp_layer_types"]
    return types.index("sparse") if "sparse" in types else len(types)


def _require_interleaved(config: Config) -> None:
    if not config.get("rope_interleave", True):
        raise ValueError(
            f"models of type {config['model_type']!r} with rope_interleave=False: vLLM's class rotates pairs of "
            "neighbouring channels, whatever the config says. Choose a checkpoint with rope_interleave=True."
        )


def _refused(reason: str) -> Family:
    return Family(tested=False, refused=reason)


_SILU, _GELU = ("silu",), ("gelu", "gelu_pytorch_tanh")
_SPARSE = "its attention is sparse (an indexer chooses keys), and what vLLM keeps for the indexer cannot be checked"
_ROUTER = (".mlp.gate.weight",)
_GRANITE = {"experts_together": True, "experts_counted": False}
_GRANITE_ROUTER = ((".router.", ".gate."),)
_MIXTRAL = (
    (".mlp.", ".block_sparse_moe."),
    (".experts.gate_up_proj", ".experts.w13"),
    (".experts.down_proj", ".experts.w2"),
)
_DECAY = (".linear_attn.A_log",)  # the state decays by exp(-exp(A_log) ...), where a rounding of A_log would show
_ROWS = {
    "afmoe": Family(
        activations=_SILU,
        fp32=(".mlp.router.gate.weight", ".mlp.expert_bias"),
        in_engine=((".router.gate.", ".gate."),),
        engine_fields=_afmoe,
    ),
    "apertus": Family(activations=("xielu",)),
    "arcee": Family(activations=("relu2",)),
    "axk1": _refused("vLLM's class has another name for the norm after the experts"),
    # vLLM compiles `commandr.layer_norm_func`
    "cohere": Family(followed=True, compiled_on_cuda="norms, in one way for a single row and in another for several,"),
    "cohere2": Family(),
    "cohere2_moe": Family(),
    "cwm": Family(activations=_SILU),
    "deepseek_v2": Family(activations=_SILU, engine_fields=_deepseek_v2),
    "deepseek_v3": Family(activations=_SILU, engine_fields=_deepseek_v3),
    "deepseek_v32": _refused(_SPARSE),
    "deepseek_v4": _refused(
        "its attention is compressed and sparse, and vLLM's class has other names for most tensors"
    ),
    "ernie4_5": Family(activations=_SILU),
    "ernie4_5_moe": Family(
        activations=_SILU,
        fp32=(".mlp.gate.weight", ".e_score_correction_bias"),
        stored=((".gate.moe_statics.", ".moe_statics."),),
        in_engine=((".moe_statics.", ".gate."),),
    ),
    "exaone4": Family(activations=_SILU),
    "flex_olmo": Family(by_transformers=True),
    "gemma": Family(activations=_GELU, followed=True),
    "gemma2": Family(activations=("gelu_pytorch_tanh",), followed=True),
    "gemma3": Family(),
    "gemma3_text": Family(
        activations=("silu", *_GELU),
        stored=((".vision_tower.", ".vision_tower.vision_model."),),
        sees_images_whole=True,
        followed=True,
    ),
    "gemma3n_text": _refused(
        "vLLM's class of the text model computes without its per-layer embeddings: it is another model"
    ),
    "glm": Family(activations=_SILU, followed=True),
    "glm4": Family(activations=_SILU, followed=True),
    "glm4_moe": Family(activations=_SILU, fp32=_ROUTER),
    "glm4_moe_lite": Family(activations=_SILU, fp32=_ROUTER, engine_fields=_glm4_moe_lite),
    "glm_moe_dsa": _refused(_SPARSE),
    "gpt_bigcode": Family(tested=False, by_transformers=True),
    "gpt_neox": Family(tested=False),
    "gpt_oss": Family(
        sinks=True,
        in_engine=((".self_attn.", ".attn."), (".embed_tokens.", ".embedding.")),
        experts_together=True,
        followed=True,
    ),
    "granite": Family(activations=_SILU, followed=True),
    "granite_swa": Family(activations=_SILU, sinks=True),
    "granitemoe": Family(in_engine=_GRANITE_ROUTER, **_GRANITE),
    "granitemoe_swa": Family(sinks=True, in_engine=_GRANITE_ROUTER, **_GRANITE),
    "granitemoehybrid": Family(
        stored=(
            (".router.", ".router.layer."),
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
        ),
        in_engine=(
            (".router.layer.", ".gate."),
            (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
        ),
        **_GRANITE,
    ),
    "granitemoeshared": Family(in_engine=_GRANITE_ROUTER, **_GRANITE),
    "hrm_text": _refused("vLLM's class fuses projections in a way that it does not list (no packed_modules_mapping)"),
    "hunyuan_v1_dense": Family(by_transformers=True),
    "hunyuan_v1_moe": Family(by_transformers=True),
    "hy_v3": Family(
        activations=_SILU,
        fp32=_ROUTER,
        stored=(
            (".mlp.gate.weight", ".mlp.router.gate.weight"),
            (".e_score_correction_bias", ".expert_bias"),
            (".shared_experts.", ".shared_mlp."),
        ),
        in_engine=((".router.gate.", ".gate."),),
        engine_fields=_hy_v3,
    ),
    "hy_v4": _refused(_SPARSE),
    "hyperclovax": Family(activations=_SILU),
    "jais2": Family(),
    "laguna": _refused("vLLM loads no correction bias of its routers"),
    "lfm2": _refused("vLLM's class reads block_dim, which transformers' config does not have"),
    "llama": Family(activations=_SILU, followed=True),
    "llama4_text": _refused("vLLM permutes the rows of its q_proj and k_proj, so that they cannot be read back"),
    "mellum": Family(),
    "minicpm3": _refused(
        "vLLM's class creates q_a_proj without a name, so that no list of unquantized layers can contain it"
    ),
    "minimax_m2": Family(fp32=_ROUTER, stored=_MIXTRAL, engine_fields=_minimax_m2),
    "ministral3": Family(activations=_SILU),
    "mistral": Family(activations=_SILU, followed=True),
    "mistral3": Family(scales_renamed=True),
    "mixtral": Family(activations=_SILU, stored=_MIXTRAL, followed=True),
    "nemotron": Family(),
    "olmo": Family(by_transformers=True),
    "olmo2": Family(by_transformers=True),
    "olmo3": Family(by_transformers=True),
    "olmo_hybrid": _refused("nobody has tested yet that its linear attention can be read back from vLLM's class"),
    "olmoe": Family(activations=_SILU, followed=True),
    "opt": Family(),
    "phi": Family(),
    "phi3": Family(activations=_SILU, followed=True),
    "qwen2": Family(activations=_SILU, one_window=True, followed=True),
    "qwen2_5_vl": Family(),
    "qwen2_moe": Family(activations=_SILU, followed=True),
    "qwen2_vl": Family(),
    "qwen3": Family(activations=_SILU, one_window=True, followed=True),
    "qwen3_5": Family(),
    "qwen3_5_moe": Family(),
    "qwen3_5_moe_text": Family(fp32=_DECAY),
    "qwen3_5_text": Family(fp32=_DECAY),
    "qwen3_moe": Family(activations=_SILU, followed=True),
    "qwen3_next": Family(activations=_SILU, fp32=_DECAY),
    "qwen3_vl": Family(),
    "seed_oss": Family(activations=_SILU),
    "smollm3": Family(by_transformers=True),
    "stablelm": Family(fuses_unsaid=True),
    "starcoder2": Family(by_transformers=True),
    "vaultgemma": Family(by_transformers=True),
}


def families_with(vllm: VLLM) -> dict[str, Family]:
    """Return the rows for a version of vLLM: `_ROWS`, changed where that version serves a type by transformers' code,
    has other names of modules, or cannot serve the type.
    """
    families = dict(_ROWS)
    for kind in vllm.by_transformers:
        families[kind] = replace(_ROWS[kind], by_transformers=True, activations=(), followed=False)
    for kind, parts in vllm.in_engine.items():
        families[kind] = replace(families[kind], in_engine=parts)
    for kind, reason in vllm.refused.items():
        families[kind] = replace(families[kind], tested=False, refused=reason)
    return families


FAMILIES = families_with(installed_vllm())
_UNKNOWN = Family(tested=False)


def family_of(model_type: str) -> Family:
    """Return the row of a model type. For a type without a row return the defaults, as an untested type."""
    return FAMILIES.get(model_type, _UNKNOWN)


def types_with(field: str) -> tuple[str, ...]:
    """Return the model types in whose rows a field is set, in alphabetical order."""
    return tuple(kind for kind, family in FAMILIES.items() if getattr(family, field))
