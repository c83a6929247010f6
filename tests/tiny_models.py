"""Tiny checkpoints of the architectures that the tests train: random weights, a character tokenizer, no download."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789+-*/=?<>()., :\n", *"abcdefghijklmnopqrstuvwxyz"]


def tokenizer() -> PreTrainedTokenizerFast:
    extra = [f"<extra_{index}>" for index in range(-len(VOCABULARY) % 64)]
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCABULARY + extra)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", model_max_length=128, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def config(architecture: str = "qwen3", *, tied: bool = False, **overrides):
    """A config whose linear layers are all 128-aligned, unless `overrides` change that."""
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
    if architecture != "qwen2":  # Qwen2's config has none and divides hidden_size by heads: 2 heads of 64
        values["head_dim"] = 64
    else:
        values |= dict(num_attention_heads=2)
    if architecture == "qwen3_moe":
        values |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1)
    return ARCHITECTURES[architecture][0](**(values | overrides))


def save_checkpoint(
    folder: Path, architecture: str = "qwen3", *, seed: int = 0, tied: bool = False, **overrides
) -> str:
    """Write a BF16 checkpoint and its tokenizer; returns the folder as a string."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture][1](config(architecture, tied=tied, **overrides)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():  # biases start at zero, which would hide that they are dropped
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
