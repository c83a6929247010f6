"""Tiny policies of any model type that transformers and vLLM can both build on a CPU; most of them no test trains."""

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)


# What a config takes of these, whatever its model type
_COMMON = dict(
    **dict(vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=2, max_position_embeddings=128),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    **dict(num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2),
    **dict(
        moe_intermediate_size=128, shared_expert_intermediate_size=128, n_shared_experts=1, first_k_dense_replace=1
    ),
    **dict(n_group=1, topk_group=1, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64),
    **dict(v_head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64),
    **dict(
        linear_value_head_dim=64,
        n_embd=256,
        n_head=4,
        n_layer=2,
        n_positions=128,
        ffn_dim=256,
        word_embed_proj_dim=256,
    ),
)
_HYBRID = dict(full_attention_interval=2)
_TURNED = dict(rope_type="default", rope_theta=1e6)
_TURNED_IN_PART = dict(partial_rotary_factor=0.25, mrope_section=[4, 2, 2], mrope_interleaved=True)
_SPECIAL = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), dict(num_key_value_heads=4)),  # as many as of q
    "bloom": dict(head_dim=None),
    "falcon": dict(head_dim=None, new_decoder_architecture=True, num_kv_heads=2),
    "gemma3n_text": dict(
        **dict(vocab_size_per_layer_input=256, hidden_size_per_layer_input=64, num_hidden_layers=4, laurel_rank=64),
        **dict(num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2),
        **dict(activation_sparsity_pattern=[0.0] * 4),
    ),
    "glm4_moe": dict(head_dim=64, use_qk_norm=True),
    "gpt2": dict(head_dim=None),
    "granitemoehybrid": dict(layer_types=["attention"] * 2, shared_intermediate_size=256),
    "jamba": dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "lfm2_moe": dict(num_dense_layers=1, layer_types=["conv", "full_attention"]),
    "llama4_text": dict(intermediate_size_mlp=256),
    "nemotron_h": dict(
        **dict(layers_block_type=["mamba", "attention", "mlp"], mamba_num_heads=8, mamba_head_dim=64, n_groups=1),
        **dict(ssm_state_size=16, num_hidden_layers=None),
    ),
    "phi": dict(intermediate_size=1024, num_key_value_heads=4),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text"), _HYBRID | dict(rope_parameters=_TURNED | _TURNED_IN_PART)),
    "qwen3_next": _HYBRID,
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text"), dict(rope_parameters=_TURNED | dict(mrope_section=[8, 12, 12]))
    ),
    "qwen3_vl_text": dict(rope_parameters=_TURNED | dict(mrope_section=[12, 10, 10], mrope_interleaved=True)),
}
_QWEN = dict(depth=2, hidden_size=64, num_heads=2, patch_size=8, spatial_merge_size=2)
_TOWER = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, patch_size=8)
VISION = {  # vision-language models -> their towers
    "gemma3": _TOWER | dict(image_size=32, vision_use_head=False),
    "mistral3": _TOWER | dict(image_size=64),
    "qwen2_vl": _QWEN | dict(embed_dim=64, hidden_size=256),
    "qwen2_5_vl": _QWEN | dict(intermediate_size=128, out_hidden_size=256, window_size=32, fullatt_block_indexes=[1]),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        _QWEN | dict(intermediate_size=128, out_hidden_size=256, num_position_embeddings=16),
    ),
    "qwen3_vl": _QWEN
    | dict(intermediate_size=128, out_hidden_size=256, deepstack_visual_indexes=[0], num_position_embeddings=16),
}


def config(model_type: str, **overrides) -> PretrainedConfig:
    """Return the config of tiny sizes that its class builds, with `overrides`."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    if hasattr(default, "vision_config"):
        parts = {"vision_config": VISION[model_type]} | overrides
        return config_class(text_config=config(default.text_config.model_type).to_dict(), **parts)
    always = ("vocab_size", "hidden_size", "num_hidden_layers")
    values = {name: value for name, value in _COMMON.items() if hasattr(default, name) or name in always}
    values |= _SPECIAL.get(model_type, {}) | overrides
    return config_class(**{name: value for name, value in values.items() if value is not None})


def policy(model_type: str, **overrides) -> PreTrainedModel:
    """Return the model that TRL would train, with random weights, none of them zero."""
    torch.manual_seed(0)
    model_config = config(model_type, **overrides)
    auto = AutoModelForImageTextToText if hasattr(model_config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(model_config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    model.config.architectures = [type(model).__name__]
    return model
