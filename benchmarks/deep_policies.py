"""Policies of many layers, whose linears are whole 128x128 blocks: random, trained, and those of a real checkpoint.

Errors grow otherwise in random weights than in trained ones. Norm weights of exactly 1 hide where roundings differ:
random policies get ones that are spread around 1, a checkpoint brings its own, and its outliers. One whose sizes are
no multiples of 128 is padded with zeros, which leaves its function as it is.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, Qwen3Config

from examples.addition_task import PretrainRecipe, build_tokenizer, cached_checkpoint, reinforcement_dataset


BLOCK = 128
TEXTS = (
    "The capital of France is",
    "2 + 2 =",
    "Once upon a time, in a village by the sea,",
    "def add(a, b):",
    "Water boils at",
    "My favourite season is autumn, because",
    "The three primary colours are",
    "To make bread you need",
    "She opened the letter and",
    "A train leaves at noon and travels at 60 miles an hour. After two hours",
    "import numpy as np\n",
    "The opposite of hot is",
    "In 1969",
    "Dear Sir or Madam,",
    "Photosynthesis is",
    "List of planets: Mercury, Venus,",
)


TRAINED = {2: PretrainRecipe(), 24: PretrainRecipe(layers=24, learning_rate=3e-3, warmup_steps=30, max_steps=300)}


class DeepPolicy(Protocol):
    """Where a policy of so many layers comes from.

    Attributes:
        weights: What they are, in a word.
        source: The same at length, for the result file.
        ends: Its completions end where it ends them; without, only at their greatest length.
        groups: Of 8 sequences, to sample from each seed.
    """

    weights: str
    source: str
    ends: bool
    groups: int

    def checkpoint(self, folder: Path, layers: int) -> str:
        """A folder with such a policy, this one or another."""

    def seed(self, model: PreTrainedModel, seed: int) -> None:
        """Give `model` the weights of `seed`, if they depend on it."""

    def prompts(self) -> list[str]: ...

    def facts(self, layers: int) -> dict:
        """What else is known of it."""


class RandomPolicy:
    """Qwen3 with random weights, other ones for each seed: linears that keep the size of what they multiply, logits
    with a standard deviation of 2.
    """

    weights = "random"
    source = "Qwen3, hidden size 512, 64 tokens, linears N(0, 1 / in-features), norm weights exp(0.5 N(0, 1))"
    ends, groups = False, 1

    def checkpoint(self, folder: Path, layers: int) -> str:
        tokenizer = build_tokenizer()
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    @torch.no_grad()
    def seed(self, model: PreTrainedModel, seed: int) -> None:
        """Give `model` the weights of `seed`."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                drawn = (0.5 * drawn).exp()
            elif "embed" not in name:
                drawn *= (2 if "lm_head" in name else 1) * parameter.shape[1] ** -0.5
            parameter.copy_(drawn)

    def prompts(self) -> list[str]:
        return _problems()

    def facts(self, layers: int) -> dict:
        return {}


class TrainedPolicy:
    """Qwen3, pretrained on the addition task when it is first asked for; a seed changes only what is sampled."""

    weights = "trained"
    source = "Qwen3, hidden size 128, pretrained on two-digit addition (examples/addition_task.py)"
    ends, groups = True, 4

    def checkpoint(self, folder: Path, layers: int) -> str:
        return str(cached_checkpoint(TRAINED[layers]))

    def seed(self, model: PreTrainedModel, seed: int) -> None:
        pass

    def prompts(self) -> list[str]:
        return _problems()

    def facts(self, layers: int) -> dict:
        """How well it answers problems that it was not trained on, when its pretraining ended."""
        text = (cached_checkpoint(TRAINED[layers]) / "pretraining.json").read_text()
        step, accuracy = json.loads(text)["accuracies"][-1]
        return {"pretraining_steps": step, "accuracy": accuracy}


class CheckpointPolicy:
    """The first layers of a Llama in a GGUF file; a seed changes only what is sampled."""

    ends, groups = False, 1

    def __init__(self, gguf: Path):
        self.gguf = gguf
        self.weights = gguf.stem
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
        self.source = (
            f"{gguf.name}, SHA-256 {digest}, dequantized, its first layers, zero-padded to multiples of {BLOCK}"
        )

    def checkpoint(self, folder: Path, layers: int) -> str:
        found = {"pretrained_model_name_or_path": self.gguf.parent, "gguf_file": self.gguf.name}
        whole = AutoModelForCausalLM.from_pretrained(**found, dtype=torch.float32)
        padded_to_blocks(whole, layers).to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(**found).save_pretrained(folder)
        return str(folder)

    def seed(self, model: PreTrainedModel, seed: int) -> None:
        pass

    def prompts(self) -> list[str]:
        return list(TEXTS)

    def facts(self, layers: int) -> dict:
        return {}


def _problems() -> list[str]:
    return [row["prompt"] for row in reinforcement_dataset()]


@torch.no_grad()
def padded_to_blocks(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A Llama with the first `layers` of `model`, that computes the same with all sizes multiples of 128.

    Zero rows and columns add nothing. An RMSNorm of H elements among H' divides by a root mean square that is
    sqrt(H / H') as large, which its weights undo.
    """
    config = type(model.config)(**model.config.to_dict() | {"quantization_config": None})
    del config.quantization_config
    hidden, group = config.hidden_size, config.num_attention_heads // config.num_key_value_heads
    config.num_hidden_layers = layers
    config.intermediate_size = _up(config.intermediate_size)
    config.num_key_value_heads = _up(config.num_key_value_heads * config.head_dim) // config.head_dim
    config.num_attention_heads = group * config.num_key_value_heads
    config.hidden_size = _up(hidden, math.lcm(BLOCK, config.num_attention_heads))  # transformers wants it divisible
    config.rms_norm_eps *= hidden / config.hidden_size
    padded = LlamaForCausalLM(config)
    theirs = dict(model.named_parameters())
    for name, parameter in padded.named_parameters():
        parameter.zero_()
        values = theirs[name]
        scale = (hidden / config.hidden_size) ** 0.5 if parameter.dim() == 1 else 1.0
        parameter[tuple(map(slice, values.shape))] = scale * values
    return padded


def _up(size: int, multiple: int = BLOCK) -> int:
    return -(-size // multiple) * multiple
