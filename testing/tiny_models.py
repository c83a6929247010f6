"""Tiny checkpoints of the architectures that the tests train: random weights, a character tokenizer, no download."""

from pathlib import Path

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from .tokenizer import tokenizer


ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "cohere": (CohereConfig, CohereForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}
OF_ITS_OWN = {  # values at which each of its operations shows; an engine has no output head of Cohere or Gemma 2
    "cohere": dict(tie_word_embeddings=True, logit_scale=0.3),
    "gemma2": dict(
        tie_word_embeddings=True,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=48,
        sliding_window=16,
    ),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=128, sliding_window=16),
    "granite": dict(
        embedding_multiplier=7.3,
        residual_multiplier=0.43,
        attention_multiplier=0.11,
        logits_scaling=0.7,
        mlp_bias=True,
    ),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1),
    "qwen2_moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        decoder_sparse_step=1,
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=128),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2, intermediate_size=128),
    "glm4_moe": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
}


def config(architecture: str = "qwen3", *, tied: bool = False, **overrides):
    """Return a config whose linear layers are all 128-aligned, unless `overrides` change that."""
    values = dict(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if architecture not in (
        "qwen2",
        "qwen2_moe",
        "olmoe",
        "granite",
        "phi3",
    ):  # these divide hidden_size by heads: 2 heads of 64
        values["head_dim"] = 64
    else:
        values |= dict(num_attention_heads=2)
    return ARCHITECTURES[architecture][0](**(values | OF_ITS_OWN.get(architecture, {}) | overrides))


def build(architecture: str = "qwen3", *, seed: int = 0, tied: bool = False, **overrides) -> PreTrainedModel:
    """Return the FP32 model of `config`, in evaluation mode."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture][1](config(architecture, tied=tied, **overrides)).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "sinks")):  # they start at zero, which would hide that they are dropped
            torch.nn.init.normal_(tensor, std=0.1)
    return model


def on_meta(architecture: str = "qwen3", **options) -> PreTrainedModel:
    """Return the model of `build` on the meta device."""
    with torch.device("meta"):
        return build(architecture, **options)


def save_checkpoint(
    folder: Path, architecture: str = "qwen3", *, seed: int = 0, tied: bool = False, **overrides
) -> str:
    """Write a BF16 checkpoint and its tokenizer; returns the folder as a string."""
    build(architecture, seed=seed, tied=tied, **overrides).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
