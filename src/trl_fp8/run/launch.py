"""Checks before an engine starts: the dataset has rows, ranks know of each other, the disk has room.

A run may write its first checkpoint after hours. Whether it can is checked at the start.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from heapq import nlargest
from inspect import Parameter, signature
from math import prod
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from datasets import Dataset, IterableDataset
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import TrainingArguments
from transformers.modeling_utils import is_fsdp_enabled
from transformers.utils.quantization_config import QuantizationConfigMixin
from trl.distributed import DistributedBackend

from trl_fp8.export.file_checksums import writable_parent
from trl_fp8.recipe.messages import format_bytes
from trl_fp8.recipe.names import full_shape

from .engine_flags import fsdp1_message


NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
# Arguments with which TRL 1.16 calls a reward, beside the columns
OF_REWARDS = "prompts completions completion_ids trainer_state log_extra log_metric environments".split()
TOKENIZED = 16  # prompts of a dataset, before a run
ADAM = ("adamw_torch", "adamw_torch_fused")  # they keep two moments of each trained weight, in its dtype


def require_rows(dataset: object) -> None:
    """Raise `ValueError` for a dataset without rows: training would end at once and say nothing."""
    if isinstance(dataset, Sized) and not len(dataset):
        raise ValueError("train_dataset is empty. Check the split and the filters that it went through.")


def require_columns(datasets_by_argument: dict[str, object], rewards: Iterable[object], adds_columns: bool) -> None:
    """Raise `ValueError` for a dataset that lacks the prompts, or a column that a reward takes.

    Args:
        datasets_by_argument: Argument of the trainer -> its dataset. Others than those of `datasets` pass.
        rewards: As the trainer gets them. Models read no columns.
        adds_columns: A rollout function or an environment may add what rewards take.
    """
    for argument, dataset in datasets_by_argument.items():
        if not isinstance(dataset, Dataset | IterableDataset):
            continue
        columns = dataset.column_names or list(next(iter(dataset), {}))
        there = ", ".join(map(repr, columns))
        if "prompt" not in columns:
            raise ValueError(
                f"{argument} has no column 'prompt', but {there}. Rename the one with the problems: "
                f"{argument}.rename_column({columns[0]!r}, 'prompt'); with trl-fp8 train set prompt_column."
            )
        for reward in () if adds_columns else filter(callable, rewards):
            if isinstance(reward, nn.Module):
                continue
            parameters = signature(reward).parameters.values()
            needed = [each.name for each in parameters if each.default is each.empty and each.kind in NAMED]
            if lacking := [name for name in needed if name not in (*OF_REWARDS, *columns)]:
                name = getattr(reward, "__name__", type(reward).__name__)
                raise ValueError(
                    f"{argument} has no column {lacking[0]!r}, which the reward {name} takes, but {there}. Rename the "
                    f"one that is meant: {argument}.rename_column({columns[-1]!r}, {lacking[0]!r}); with trl-fp8 "
                    "train set solution_column."
                )


def require_short_prompts(dataset: object, argument: str, tokenize: Callable[[list], list], context: int) -> None:
    """Raise `ValueError` for prompts that leave no room in the engine's `context`.

    Only the few with the most characters are tokenized. A streamed dataset, and images, are left to the generation.
    """
    if not context or not isinstance(dataset, Dataset) or {"image", "images"}.intersection(dataset.column_names):
        return
    longest = nlargest(TOKENIZED, dataset["prompt"], key=lambda prompt: len(str(prompt)))
    require_room(tokenize(longest), context, f"{argument} has")


def require_room(prompt_ids: Sequence[Sequence[int]], context: int, what: str = "a turn begins with") -> None:
    """Raise `ValueError` if the longest of these prompts leaves no room in the engine's `context`."""
    tokens = max(map(len, prompt_ids), default=0)
    if context and tokens >= context:
        raise ValueError(
            f"{what} a prompt of {tokens} tokens, and the engine's context holds {context} with the completion. Raise "
            "vllm_max_model_length if the model has more positions, or filter long prompts out of the dataset."
        )


def require_path(model: nn.Module) -> None:
    """Raise `ValueError` for a model that was made in memory: vLLM reads its config and tokenizer from a path."""
    if not model.config.name_or_path:
        raise ValueError(
            f"model is a {type(model).__name__} that was loaded from nowhere (its config has no name_or_path), and "
            "the engine reads config and tokenizer from a folder. Save both with save_pretrained(folder), and give "
            "model=folder."
        )


def require_no_images(dataset: object, name: str) -> None:
    """Raise `ValueError` for a dataset with images, which the text model `name` would be sent in its prompts."""
    if columns := {"image", "images"}.intersection(getattr(dataset, "column_names", None) or ()):
        raise ValueError(
            f"train_dataset has a column {min(columns)!r}, but model={name!r} sees no images. Remove the column, or "
            "take a vision-language model."
        )


def require_no_qlora(quantization: QuantizationConfigMixin | Mapping[str, Any] | None) -> None:
    """Raise `ValueError` for a base in 4 or 8 bits: its weights cannot be quantized again for the engine."""
    fields = quantization.to_dict() if isinstance(quantization, QuantizationConfigMixin) else quantization or {}
    for name in ("load_in_4bit", "load_in_8bit"):
        if fields.get(name):
            raise ValueError(
                f"{name}=True: QLoRA is not supported. Set fp8_base=True instead, for LoRA on an FP8 base."
            )


def require_same_turns(tools: list, tensor_parallel_size: int, server_ranks: int = 1) -> None:
    """Raise `ValueError` for tools, an environment's too, where ranks share an engine: with tools each rank takes as
    many turns as its own rollouts need, and these ranks can only generate together. `server_ranks` share a server.
    """
    if tools and server_ranks > 1:
        raise ValueError(
            f"vllm_mode='server' with tools, or an environment that has some, and {server_ranks} trainer ranks: they "
            "generate together, but TRL 1.16 lets each generate as often as its own rollouts call tools. They would "
            "wait for each other forever. Start one process, or set vllm_mode='colocate'."
        )
    if tools and tensor_parallel_size > 1:
        raise ValueError(
            f"vllm_tensor_parallel_size={tensor_parallel_size} with tools, or an environment that has some: the ranks "
            "of an engine generate together, but TRL 1.16 lets each call it as often as its own rollouts call tools. "
            "They would wait for each other forever, or get each other's completions. Set "
            "vllm_tensor_parallel_size=1; FSDP2 or vllm_enable_sleep_mode=True make room for whole engines."
        )


def check_launch(accelerator: Accelerator, tensor_parallel_size: int = 1) -> None:
    """Raise `ValueError` if processes were started that do not know of each other, if they cannot be divided among
    engines, or if FSDP1 was chosen.
    """
    started = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if started > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"the launcher started WORLD_SIZE={started} processes, but accelerate formed no group of them, because it "
            "found no accelerator: each would train a policy of its own and write to the same output_dir. On CPU set "
            "use_cpu=True (or ACCELERATE_USE_CPU=true in the environment)."
        )
    if accelerator.num_processes % tensor_parallel_size:
        raise ValueError(
            f"vllm_tensor_parallel_size={tensor_parallel_size}: an engine runs on {tensor_parallel_size} processes, "
            f"and the launch has num_processes={accelerator.num_processes}. Give trl-fp8 train or accelerate launch "
            f"--num_processes {tensor_parallel_size}, or a multiple of it, or set vllm_tensor_parallel_size=1."
        )
    if DistributedBackend(accelerator).fsdp_version == 1:
        raise ValueError(fsdp1_message("fsdp_version: 1 in the accelerate configuration", "fsdp_version: 2"))


def launch_words(accelerator: Accelerator) -> str:
    """Return how the run was launched, as in "2 processes, DDP"."""
    if accelerator.distributed_type is DistributedType.NO:
        return "1 process"
    backend = DistributedBackend(accelerator)
    sharding = "DDP"
    if backend.zero_stage:
        sharding = f"ZeRO-{backend.zero_stage}"
    elif backend.is_fsdp:
        sharding = f"FSDP{backend.fsdp_version}"
    processes = accelerator.num_processes
    return f"{processes} process{'es' if processes > 1 else ''}, {sharding}"


@torch.no_grad()
def load_on_all_ranks(reference: nn.Module, device: torch.device) -> None:
    """Give every rank the weights of TRL's reference model that the first one loaded. A collective.

    With FSDP's cpu_ram_efficient_loading, accelerate's default, transformers loads a model on the first rank of a node
    alone. accelerate sends the policy's weights to the others; TRL 1.16 shards its reference without them.
    """
    if not is_fsdp_enabled():
        return
    for tensor in (*reference.parameters(), *reference.buffers()):
        loaded = tensor.to(device)
        torch.distributed.broadcast(loaded, 0)
        tensor.copy_(loaded)


def checkpoint_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the weights in a checkpoint of `model`, which holds adapters alone if there are any, and of
    its trained weights.
    """
    trained = sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        return trained, trained
    return sum(_bytes(parameter) for parameter in model.parameters()), trained


def _bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of a whole parameter, also where DeepSpeed's ZeRO-3 left an empty tensor in its place."""
    return prod(full_shape(parameter)) * parameter.element_size()


def require_output(args: TrainingArguments, weights: float, trained: float) -> None:
    """Raise `ValueError` if `output_dir` cannot be written, or its disk has no room for a checkpoint. Makes no folder.

    `weights`, `trained`: `checkpoint_bytes`. An optimizer that is not Adam counts as nothing.
    """
    disk = shutil.disk_usage(writable_parent(args.output_dir, "output_dir"))
    saves = str(args.save_strategy.value) != "no"
    optimizer = 2 * trained if saves and not args.save_only_model and args.optim in ADAM else 0
    if disk.total and disk.free < weights + optimizer:  # a file system without accounting reports 0
        parts = f"weights {format_bytes(weights)}" + (f", optimizer {format_bytes(optimizer)}" if optimizer else "")
        without = ", or leave the optimizer out with save_only_model=True (no run resumes from that)"
        raise ValueError(
            f"output_dir={args.output_dir!r}: its disk has {format_bytes(disk.free)} left, and "
            f"{'a checkpoint' if saves else 'the model'} takes {format_bytes(weights + optimizer)} ({parts}). "
            f"Make room, set output_dir to a larger disk{without if optimizer else ''}."
        )
