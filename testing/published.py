"""Configs of published models, as far as they decide shapes."""

from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig


QWEN3 = dict(
    vocab_size=151936,
    head_dim=128,
    max_position_embeddings=40960,
    rope_theta=1e6,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def qwen3_1_7b() -> Qwen3Config:
    return _qwen3(hidden=2048, mlp=6144, layers=28, heads=16, tied=True)


def qwen3_4b() -> Qwen3Config:
    return _qwen3(hidden=2560, mlp=9728, layers=36, heads=32, tied=True)


def qwen3_8b() -> Qwen3Config:
    return _qwen3(hidden=4096, mlp=12288, layers=36, heads=32, tied=False)


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        **QWEN3,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=tied,
    )


def qwen3_30b_a3b() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **QWEN3,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        tie_word_embeddings=False,
    )


def llama3_1_8b() -> LlamaConfig:
    """It has no head_dim."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=None,
    )
