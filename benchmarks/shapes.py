"""The models that benchmarks run: shapes of published models,
with random weights made in place. Nothing is downloaded.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from testing import published, tiny_models
from testing.tokenizer import tokenizer


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "tiny": lambda: tiny_models.config(vocab_size=512, max_position_embeddings=40960),
    "qwen3_1_7b": published.qwen3_1_7b,
    "qwen3_8b": published.qwen3_8b,
}
# What is FP8 in the engine, as flags of `FP8GRPOConfig`
PRECISIONS = {
    "bf16": {"fp8_weights": False, "kv_cache_dtype": "auto"},
    "fp8_linears": {"kv_cache_dtype": "auto"},
    "fp8_linears_kv": {},
}


def config(size: str, layers: int | None = None) -> Qwen3Config:
    made = SIZES[size]()
    made.architectures = ["Qwen3ForCausalLM"]
    if layers:
        made.num_hidden_layers, made.layer_types = layers, made.layer_types[:layers]
    return made


def write_folder(size: str, folder: Path, layers: int | None = None) -> str:
    """Config and tokenizer of a model without weights, which an engine with `load_format="dummy"` starts from."""
    config(size, layers).save_pretrained(folder)
    # the models' vocabularies are larger: text is only the prompts' way in
    tokenizer(max_length=40960).save_pretrained(folder)
    return str(folder)


def policy(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder with random weights, made on the device; `name_or_path` is the folder."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


def on_meta(folder: str) -> PreTrainedModel:
    """The model of a folder without memory, for a recipe or a plan."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def accelerator() -> Accelerator:
    return Accelerator(cpu=DEVICE == "cpu")


def random_tokens(size: str, sequences: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids `[sequences, length]` on the host, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, config(size).vocab_size, (sequences, length), generator=generator)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], object]) -> float:
    """Wall time of one call, from an idle device to an idle device."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


class Stopwatch:
    """Adds up the wall time of methods, under labels.

    Attributes:
        seconds: Label -> wall time of all calls since `clear`, the device idle before and after each.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def clear(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def time(self, owner: object, attribute: str, label: str) -> None:
        """From now on the method or module function `owner.attribute` is timed."""
        function = getattr(owner, attribute)
        self.seconds[label] = 0.0

        def timed(*args, **kwargs):
            result = []
            self.seconds[label] += seconds_of(lambda: result.append(function(*args, **kwargs)))
            return result[0]

        setattr(owner, attribute, timed)


class PeakMemory:
    """Most bytes allocated on the GPU since it was made, beyond those at that time. None on CPU: see /proc instead."""

    def __init__(self):
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    @property
    def bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() - self.before if DEVICE == "cuda" else None


def copy_rate(repeats: int = 5) -> float:
    """Gigabytes per second that the device copies from its memory into its memory
    (each byte read and written once).
    """
    source = torch.ones(2**30 if DEVICE == "cuda" else 2**26, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    return max(source.nbytes / seconds_of(lambda: target.copy_(source)) / 1e9 for _ in range(repeats))


def as_a_single_rank() -> None:
    """The environment that vLLM's external launcher wants; TRL and this project set it for their own engines."""
    from trl.trainer.utils import ensure_master_addr_port

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    ensure_master_addr_port()


def kwargs_from(text: str) -> dict:
    """`vllm_engine_kwargs` as given on a command line."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"{text}: expected a JSON object of keyword arguments of vllm.LLM")
    return given


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
