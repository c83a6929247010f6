"""Checks before an engine starts: the dataset has rows, ranks know of each other, the disk has room.

A run may write its first checkpoint after hours. So its folder and its disk are checked at the start.
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


NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)  # kinds of parameters that take an argument by name
# Arguments with which TRL 1.16 calls a reward function, beside the columns
REWARD_ARGUMENTS = "prompts completions completion_ids trainer_state log_extra log_metric environments".split()
TOKENIZED = 16  # number of a dataset's longest prompts that are tokenized before a run
ADAM = ("adamw_torch", "adamw_torch_fused")  # optimizers with two moments of each trained weight, in its dtype


def require_rows(dataset: object) -> None:
    """Raise `ValueError` for a dataset without rows: training would end at once, without an error."""
    if isinstance(dataset, Sized) and not len(dataset):
        raise ValueError("train_dataset is empty. Check the split and the filters that it went through.")


def require_known_commit(config: Any, model_init_kwargs: Mapping[str, Any] | None) -> None:
    """Raise `ValueError` if a policy was loaded from a revision, and transformers kept no commit in its `config`.

    transformers 5.19 keeps none. vLLM, and the checks that read the model again, would then read its main branch.
    """
    revision = (model_init_kwargs or {}).get("revision")
    is_known = getattr(config, "_commit_hash", None) is not None or os.path.isdir(config.name_or_path)
    if revision not in (None, "main") and not is_known:
        raise ValueError(
            f"model_init_kwargs has revision={revision!r}, but this version of transformers keeps no commit in a "
            "config, so vLLM would read the main branch. Save that revision to a folder and train from the folder, or "
            "install transformers 5.17."
        )


def require_columns(datasets_by_argument: dict[str, object], rewards: Iterable[object], adds_columns: bool) -> None:
    """Raise `ValueError` for a dataset that lacks the column "prompt", or a column that a reward takes.

    Args:
        datasets_by_argument: Argument of the trainer -> its dataset. Only classes of `datasets` are checked.
        rewards: Functions, models and names of models, as the trainer gets them. Only functions read columns.
        adds_columns: A rollout function or an environment may add columns, so no reward's columns are checked.
    """
    for argument, dataset in datasets_by_argument.items():
        if not isinstance(dataset, Dataset | IterableDataset):
            continue
        # A streamed dataset may know its columns only from its first row
        columns = dataset.column_names or list(next(iter(dataset), {}))
        if not columns:
            raise ValueError(f"{argument} is empty. Check the split and the filters that it went through.")
        column_list = ", ".join(map(repr, columns))
        if "prompt" not in columns:
            raise ValueError(
                f"{argument} has no column 'prompt', but {column_list}. Rename the one with the problems: "
                f"{argument}.rename_column({columns[0]!r}, 'prompt'); with trl-fp8 train set prompt_column."
            )
        for reward in rewards:
            if adds_columns or isinstance(reward, nn.Module) or not callable(reward):
                continue
            parameters = signature(reward).parameters.values()
            required = [each.name for each in parameters if each.default is each.empty and each.kind in NAMED]
            missing = [name for name in required if name not in (*REWARD_ARGUMENTS, *columns)]
            if missing:
                name = getattr(reward, "__name__", type(reward).__name__)
                raise ValueError(
                    f"{argument} has no column {missing[0]!r}, which the reward {name} takes, but {column_list}. "
                    f"Rename the one that is meant: {argument}.rename_column({columns[-1]!r}, {missing[0]!r}); with "
                    "trl-fp8 train set solution_column."
                )


def require_short_prompts(dataset: object, argument: str, tokenize: Callable[[list], list], context: int) -> None:
    """Raise `ValueError` for prompts that leave no room in the engine's `context`, in tokens (0: unknown).

    Only the prompts with the most characters are tokenized. Prompts of a streamed dataset or with images are checked
    at each generation instead.
    """
    if not context or not isinstance(dataset, Dataset) or {"image", "images"}.intersection(dataset.column_names):
        return
    prompts = dataset["prompt"][:]  # reads the column at once, which is several times as fast as row by row
    longest = nlargest(TOKENIZED, prompts, key=lambda prompt: len(str(prompt)))
    require_room(tokenize(longest), context, f"{argument} has")


def require_room(prompt_ids: Sequence[Sequence[int]], context: int, what: str = "a turn begins with") -> None:
    """Raise `ValueError` if the longest of these prompts leaves no room in the engine's `context`, in tokens."""
    tokens = max(map(len, prompt_ids), default=0)
    if context and tokens >= context:
        raise ValueError(
            f"{what} a prompt of {tokens} tokens, and the engine's context holds {context} with the completion. Raise "
            "vllm_max_model_length if the model has more positions, or filter long prompts out of the dataset."
        )


def require_path(model: nn.Module) -> None:
    """Raise `ValueError` for a model that was made in memory: vLLM reads config and tokenizer from a path."""
    if not model.config.name_or_path:
        raise ValueError(
            f"model is a {type(model).__name__} that was loaded from nowhere (its config has no name_or_path), and "
            "the engine reads config and tokenizer from a folder. Save both with save_pretrained(folder), and give "
            "model=folder."
        )


def require_no_images(dataset: object, name: str) -> None:
    """Raise `ValueError` for a dataset with images, because the model `name` takes text alone."""
    columns = getattr(dataset, "column_names", None) or ()
    for column in ("image", "images"):
        if column in columns:
            raise ValueError(
                f"train_dataset has a column {column!r}, but model={name!r} sees no images. Remove the column, or "
                "take a vision-language model."
            )


def require_no_qlora(quantization: QuantizationConfigMixin | Mapping[str, Any] | None) -> None:
    """Raise `ValueError` for a base in 4 or 8 bits: its weights cannot be quantized again for the engine."""
    fields = quantization or {}
    if isinstance(quantization, QuantizationConfigMixin):
        fields = quantization.to_dict()
    for name in ("load_in_4bit", "load_in_8bit"):
        if fields.get(name):
            raise ValueError(
                f"{name}=True: QLoRA is not supported. Set fp8_base=True instead, for LoRA on an FP8 base."
            )


def require_same_turns(tools: list, tensor_parallel_size: int, server_clients: int = 1) -> None:
    """Raise `ValueError` for tools, also those of an environment, if ranks share an engine or a server.

    With tools each rank takes as many turns as its own rollouts need, and ranks that share an engine can only generate
    together. `server_clients`: number of ranks that share a server.
    """
    if tools and server_clients > 1:
        raise ValueError(
            f"vllm_mode='server' with tools, or an environment that has some, and {server_clients} trainer ranks: "
            "they generate together, but TRL 1.16 lets each generate as often as its own rollouts call tools. They "
            "would wait for each other forever. Start one process, or set vllm_mode='colocate'."
        )
    if tools and tensor_parallel_size > 1:
        raise ValueError(
            f"vllm_tensor_parallel_size={tensor_parallel_size} with tools, or an environment that has some: the ranks "
            "of an engine generate together, but TRL 1.16 lets each call it as often as its own rollouts call tools. "
            "They would wait for each other forever, or get each other's completions. Set "
            "vllm_tensor_parallel_size=1; FSDP2 or vllm_enable_sleep_mode=True make room for whole engines."
        )


def check_launch(accelerator: Accelerator, tensor_parallel_size: int = 1) -> None:
    """Raise `ValueError` if the launched processes form no group, cannot be divided among engines, or use FSDP1."""
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
    """Copy the weights of TRL's reference model from the first rank to all others. Collective.

    With FSDP's cpu_ram_efficient_loading, accelerate's default, transformers loads a model on the first rank of a node
    only. accelerate copies the policy's weights to the other ranks, but TRL 1.16 does not copy the reference's.
    """
    if not is_fsdp_enabled():
        return
    for tensor in (*reference.parameters(), *reference.buffers()):
        loaded = tensor.to(device)
        torch.distributed.broadcast(loaded, 0)
        tensor.copy_(loaded)


def checkpoint_bytes(model: nn.Module, has_average: bool = False) -> tuple[int, int]:
    """Return two sizes in bytes: of the weights in a checkpoint of `model`, and of its trained weights.

    A checkpoint of a model with adapters holds the adapters alone. With `has_average` a checkpoint of another model
    also holds the averaged model (averaged.py).
    """
    total_bytes = trained_bytes = 0
    for parameter in model.parameters():
        count = prod(full_shape(parameter))  # not `numel`: under ZeRO-3 the tensor itself is empty
        parameter_bytes = count * parameter.element_size()
        total_bytes += parameter_bytes
        if parameter.requires_grad:
            trained_bytes += parameter_bytes
    has_adapters = any(isinstance(module, BaseTunerLayer) for module in model.modules())
    if has_adapters:
        return trained_bytes, trained_bytes
    return total_bytes * (2 if has_average else 1), trained_bytes


def require_output(args: TrainingArguments, weight_bytes: float, trained_bytes: float) -> None:
    """Raise `ValueError` if `output_dir` cannot be written, or its disk has no room for a checkpoint. Creates nothing.

    The two sizes are those of `checkpoint_bytes`. Only Adam's state is counted, not that of other optimizers.
    """
    disk = shutil.disk_usage(writable_parent(args.output_dir, "output_dir"))
    saves = str(args.save_strategy.value) != "no"
    saves_moments = saves and not args.save_only_model and args.optim in ADAM
    optimizer_bytes = 2 * trained_bytes if saves_moments else 0
    needed_bytes = weight_bytes + optimizer_bytes
    if disk.total and disk.free < needed_bytes:  # a file system without accounting reports 0
        parts = f"weights {format_bytes(weight_bytes)}"
        remedies = "Make room, set output_dir to a larger disk"
        if optimizer_bytes:
            parts += f", optimizer {format_bytes(optimizer_bytes)}"
            remedies += ", or leave the optimizer out with save_only_model=True (no run resumes from that)"
        raise ValueError(
            f"output_dir={args.output_dir!r}: its disk has {format_bytes(disk.free)} left, and "
            f"{'a checkpoint' if saves else 'the model'} takes {format_bytes(needed_bytes)} ({parts}). {remedies}."
        )
