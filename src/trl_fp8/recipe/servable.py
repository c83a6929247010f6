"""Models that no engine can serve, told from names before one is started.

vLLM has to load the model into a class of its own, which takes the policy's tensors under the policy's names and lets
them be read back. What breaks this in vLLM 0.31 is listed by what gives it away: a part of a parameter's name, or the
model type where no name does (tests/engine/test_servable.py holds the lists to vLLM's classes). Other models go on:
the names of the engine, once built, are compared with the policy's (`sync.policy_checks`).
"""

import re
from collections.abc import Callable

from .outline import Outline


# Model types that vLLM serves by transformers' modeling code: it has no class of its own for them
TRANSFORMERS_BACKED = (
    *("flex_olmo", "gpt_bigcode", "hunyuan_v1_dense", "hunyuan_v1_moe", "olmo", "olmo2", "olmo3", "smollm3"),
    *("starcoder2", "vaultgemma"),
)
# Part of a parameter's name -> what it says of the model
_GIVEN_AWAY = {
    r"(?<!\.linear_attn)\.(?:conv1d\.|conv\.conv\.|A_log$)": (
        "it has layers without ordinary attention (state-space or convolution), whose tensors vLLM rearranges, so "
        "that they cannot be read back"
    ),
    r"\.(?:query_key_value|c_attn|Wqkv)\.weight$": (
        "its checkpoint has q, k, v as one tensor, whose rows vLLM may rearrange, so that they cannot be read back"
    ),
}
_SPARSE = "its attention is sparse (an indexer chooses keys), and what vLLM's class keeps for it was never read back"
_MODEL_TYPES = {
    "axk1": "vLLM holds its norms behind experts under another name",
    "deepseek_v4": "its attention is compressed and sparse, and vLLM's class has other names for most tensors",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), _SPARSE),
    "gemma3n_text": "vLLM's class of the text model computes without its per-layer embeddings: it is another model",
    "hrm_text": "vLLM's class does not say which projections it fuses (no packed_modules_mapping)",
    "laguna": "vLLM loads no correction bias of its routers",
    "lfm2": "vLLM's class reads block_dim, which transformers' config does not have",
    "llama4_text": "vLLM permutes the rows of its q_proj and k_proj, so that they cannot be read back",
    "minicpm3": "vLLM's class quantizes q_a_proj, which it gives no name, whatever is asked of it",
    "olmo_hybrid": "what vLLM's class makes of its layers of linear attention was never read back",
}
# Model types -> the activations that vLLM's class computes: it refuses others, or computes SiLU in their place
_SILU = (
    *("afmoe", "cwm", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "glm", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "granite", "granite_swa", "hy_v3", "hyperclovax", "llama", "ministral3", "mistral", "mixtral"),
    *("olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss"),
)
_GELU = ("gelu", "gelu_pytorch_tanh")
_ACTIVATIONS = {
    **dict.fromkeys(_SILU, ("silu",)),
    "apertus": ("xielu",),
    "arcee": ("relu2",),
    "gemma": _GELU,
    "gemma2": ("gelu_pytorch_tanh",),
    "gemma3_text": ("silu", *_GELU),
}
# Model types whose class of vLLM gives all layers one sliding window, or none
_WINDOWED_ALIKE = ("qwen2", "qwen3")
# Types of whole configs, whose tiny policies went through a whole run (testing/matrix)
TRAINED = (
    *("afmoe", "apertus", "arcee", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3", "gemma3_text", "glm"),
    *("glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax"),
    *("jais2", "llama", "mellum", "minimax_m2", "ministral3", "mistral", "mistral3", "mixtral", "nemotron", "olmo"),
    *("olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl"),
    *("seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma"),
)
# What always works instead, as flags
WITHOUT_ENGINE = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": False}
WITHOUT_ENGINE_WORDS = ", ".join(f"{flag}={value!r}" for flag, value in WITHOUT_ENGINE.items())
REMEDY = f"Choose another model, or train without FP8 and vLLM: {WITHOUT_ENGINE_WORDS} (TRL alone)"

# `upstream.vllm.engine_class`: architectures -> class of vLLM, or None. Not given where vLLM is absent or too slow.
Resolve = Callable[[tuple[str, ...]], str | None]


def require_servable(outline: Outline, resolve: Resolve | None = None) -> None:
    """Raise `ValueError` for a model that no engine can serve, with its config's type, reason and remedy."""
    if (reason := why_not_servable(outline, resolve)) is not None:
        raise ValueError(unservable(outline.config_type, reason))


def unservable(model_type: str, reason: str) -> str:
    """The message of an error."""
    return (
        f"models of type {model_type!r} cannot be served by an engine that is synced and audited: {reason}. {REMEDY}."
    )


def require_same_positions(outline: Outline, longest: int | None) -> None:
    """Raise `ValueError` if the engine would turn q and k of some sequences otherwise than the policy, or if sequences
    may be longer than the model's own positions.

    `longest`: Tokens of a sequence in the engine; None: as many as the model can have.
    """
    if longest and outline.context and longest > outline.context and not outline.is_stretched:
        raise ValueError(
            f"vllm_max_model_length={longest}, but the config of {outline.name} has "
            f"max_position_embeddings={outline.context}: vLLM serves no longer sequences. Set "
            f"vllm_max_model_length={outline.context} or less."
        )
    short = outline.turned_alike
    if short and (longest or outline.context) > short:
        raise ValueError(
            f"vllm_max_model_length={longest} with a {outline.model_type!r} model that turns q and k by other factors "
            f"in sequences of more than {short} tokens (longrope): vLLM takes those for all sequences if one can be "
            f"that long, so that the engine would sample the others from another policy. Set "
            f"vllm_max_model_length={short} or less."
        )


def why_not_servable(outline: Outline, resolve: Resolve | None = None) -> str | None:
    """The reason that `require_servable` gives, or None."""
    found = resolve(outline.architectures) if resolve is not None else outline.class_name
    if (found or "").startswith("Transformers") and outline.model_type not in TRANSFORMERS_BACKED:
        return (
            "vLLM 0.31 has no class of its own for them and falls back to its transformers backend, of which is known "
            f"what it makes of {', '.join(TRANSFORMERS_BACKED)}"
        )
    if found is None:
        return f"vLLM 0.31 knows no class for {', '.join(outline.architectures)} (a vLLM plugin may register one)"
    for part, reason in _GIVEN_AWAY.items():
        if (name := next(filter(re.compile(part).search, outline.parameters), None)) is not None:
            return f"{reason} ({name})"
    if outline.model_type in _MODEL_TYPES:
        return _MODEL_TYPES[outline.model_type]
    allowed = _ACTIVATIONS.get(outline.model_type, ())
    if allowed and outline.activation and outline.activation not in allowed:
        return (
            f"its config has the activation {outline.activation!r}, and vLLM's class computes {' or '.join(allowed)}"
        )
    if outline.model_type in _WINDOWED_ALIKE and len({cache.window for cache in outline.caches}) > 1:
        return (
            "its config gives some layers a sliding window (use_sliding_window=True with max_window_layers below "
            "num_hidden_layers), and vLLM's class gives one to all or none"
        )
    if not outline.head_dim:
        return "its layers have no attention, or attention heads of several sizes, and the KV cache is planned for one"
    return None
