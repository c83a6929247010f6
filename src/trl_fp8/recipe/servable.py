"""Refusals of models that no engine can serve, by model type and names of parameters, before an engine starts.

vLLM's class of a model has to load the policy's tensors under the policy's names, and to store them so that they can
be read back. `why_not_servable` recognizes models whose class does otherwise by the name of a parameter
(`_REFUSED_NAMES`) or by the model type (families.py). tests/engine/test_servable.py compares these refusals with
vLLM's classes. A model that is not refused here is checked once more after the engine has started:
`sync.policy_checks` compares the names in the engine with the policy's names.
"""

import re
from collections.abc import Callable

from .families import family_of, types_with
from .outline import Outline


# Pattern in a parameter's name -> reason. The first pattern matches conv1d and A_log of Mamba and conv.conv of LFM2,
# but not gated delta nets (linear_attn), whose tensors can be read back
_REFUSED_NAMES = {
    r"(?<!\.linear_attn)\.(?:conv1d\.|conv\.conv\.|A_log$)": (
        "it has layers without ordinary attention (state-space or convolution), whose tensors vLLM rearranges, so "
        "that they cannot be read back"
    ),
    r"\.(?:query_key_value|c_attn|Wqkv)\.weight$": (
        "its checkpoint has q, k, v as one tensor, whose rows vLLM may rearrange, so that they cannot be read back"
    ),
}
# Flags with which any model can be trained: TRL without FP8 and without vLLM
WITHOUT_ENGINE = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": False}
WITHOUT_ENGINE_WORDS = ", ".join(f"{flag}={value!r}" for flag, value in WITHOUT_ENGINE.items())
REMEDY = f"Choose another model, or train without FP8 and vLLM: {WITHOUT_ENGINE_WORDS} (TRL alone)"

# Type of `upstream.vllm.engine_class`: a function from architectures to the name of vLLM's class, or to None if vLLM
# has no class for them. A caller that does not import vLLM, which is slow and optional, passes no function. Then
# vLLM's class is not checked
Resolve = Callable[[tuple[str, ...]], str | None]


def require_servable(outline: Outline, resolve: Resolve | None = None) -> None:
    """Raise `ValueError` for a model that no engine can serve. The message has model type, reason and remedy."""
    reason = why_not_servable(outline, resolve)
    if reason is not None:
        raise ValueError(unservable(outline.config_type, reason))


def unservable(model_type: str, reason: str) -> str:
    """Return the message of the error for a model type and a reason."""
    return (
        f"models of type {model_type!r} cannot be served by an engine that is synced and audited: {reason}. {REMEDY}."
    )


def require_same_positions(outline: Outline, longest: int | None) -> None:
    """Raise `ValueError` if engine and policy would rotate q and k of some sequences by different angles.

    `longest` is the length of the engine's longest sequence, in tokens; None: as long as the model allows. A longrope
    model needs a number, because for None vLLM takes `original_max_position_embeddings`, and the trainer assumes more.
    """
    served = int(outline.context * outline.stretch)
    if longest and served and longest > served:
        scaled = f" and a linear factor of {outline.stretch:g}" if outline.stretch > 1 else ""
        raise ValueError(
            f"vllm_max_model_length={longest}, but the config of {outline.name} has "
            f"max_position_embeddings={outline.context}{scaled}: engine and policy turn q and k of longer "
            f"sequences by different angles. Set vllm_max_model_length={served} or less."
        )
    short = outline.short_factor_length
    if short and (longest or outline.context) > short:
        raise ValueError(
            f"vllm_max_model_length={longest} with a {outline.model_type!r} model that turns q and k by other factors "
            f"in sequences of more than {short} tokens (longrope). If an engine's sequences may be that long, vLLM "
            f"uses the long factors in short sequences, too, where the policy uses the short ones. Set "
            f"vllm_max_model_length={short} or less."
        )


def why_not_servable(outline: Outline, resolve: Resolve | None = None) -> str | None:
    """Return the reason for which `require_servable` raises, or None."""
    family = family_of(outline.model_type)
    vllm_class = resolve(outline.architectures) if resolve is not None else outline.class_name
    if (vllm_class or "").startswith("Transformers") and not family.by_transformers:
        return (
            "vLLM has no class of its own for them and falls back to its transformers backend, which was "
            f"tested only with {', '.join(kind for kind in types_with('by_transformers') if family_of(kind).tested)}"
        )
    if vllm_class is None:
        architectures = ", ".join(outline.architectures)
        return f"the installed vLLM knows no class for {architectures} (a vLLM plugin may register one)"
    for part, reason in _REFUSED_NAMES.items():
        for name in outline.parameters:
            if re.search(part, name):
                return f"{reason} ({name})"
    if family.refused:
        return family.refused
    allowed = family.activations
    if allowed and outline.activation and outline.activation not in allowed:
        return (
            f"its config has the activation {outline.activation!r}, and vLLM's class computes {' or '.join(allowed)}"
        )
    if family.one_window and len({cache.window for cache in outline.caches}) > 1:
        return (
            "its config gives some layers a sliding window (use_sliding_window=True with max_window_layers below "
            "num_hidden_layers), and vLLM's class gives one to all or none"
        )
    if outline.layers < 1:
        return f"its config has num_hidden_layers={outline.layers}"
    if not outline.head_dim:
        return (
            "its layers have no attention, or attention heads of several numbers or sizes, and the KV cache is "
            "planned for one"
        )
    return None
