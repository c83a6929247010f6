"""Bytes that TRL's trainer needs on each GPU, with the defaults of TRL 1.16 and transformers 5.17.

    weights     FP32 by TRL's default for `dtype`. FSDP2 or ZeRO-3 divides them over all GPUs. In that case
                accelerate casts trained weights to FP32 if they were loaded in another dtype (mixed precision)
    gradients   of the trained weights, in the dtype of the weights and divided like the weights. With LoRA only the
                adapters are trained, which are FP32
    optimizer   Adam's two moments, each as large as the gradients
    reference   weights of the reference model, only with beta > 0 and without LoRA
    copies      BF16 copies of linear layers' FP32 weights, which autocast makes and keeps during a forward. There are
                such copies only on one GPU, because FSDP2 gathers one layer at a time, and only of trained weights,
                because autocast does not keep copies of frozen weights
    inputs      of each layer, kept by gradient checkpointing. On one GPU they have the dtype of the weights, and on
                several GPUs they are BF16 (FSDP2's mixed precision)
    head        the gradient of the output head in TRL's chunked log-probs, accumulated in FP32, unsharded on every
                rank; 0 with LoRA. The logits of all tokens never exist at once
    uncounted   transient memory, not in the total: tensors that the running backward of a layer needs for each token,
                gathered weights, gradients of activations, the CUDA context, fragmentation. On each GPU a plan keeps
                free the larger of these bytes and the share `capacity.FREE`

Features add their own changes with `FlagGroup.memory_changes`.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from trl_fp8.recipe.names import fused_name
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe


GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
CONTEXT_BYTES = 2 * GIB
# Bytes that a layer saves for its backward, per token and element of the hidden size. Counted in a layer of Qwen3
# whose MLP is three times as wide as the hidden size: 53 with BF16 weights, 64 with FP32 weights under autocast
SAVED_BYTES = 64


@dataclass(frozen=True)
class Setup:
    """A training run and the GPUs for which it is planned."""

    args: Any  # an `FP8GRPOConfig`
    tokens: int = 4096  # tokens of a sequence, prompt and completion
    completions: int = 256  # completions of a generation, over all GPUs
    gpus: int = 1  # GPUs of the trainer; weights, gradients and optimizer are divided over them
    gpu_bytes: float = 80 * GIB
    lora_rank: int | None = None  # None: all weights are trained, without LoRA
    dtype: str = "float32"  # dtype of the policy's weights
    tensor_parallel_size: int | None = None  # the engine's; None: the plan chooses
    utilization: float | None = None  # vllm_gpu_memory_utilization, the engine's share; None: the plan chooses
    run_config: Mapping[str, object] | None = None  # entries of the run config file; None: there is no such file

    def with_flags(self, flags: Mapping[str, Any], **changes: Any) -> "Setup":
        """Return a copy in which `flags` of the config, and fields in `changes`, have new values."""
        args = copy(self.args)
        vars(args).update(flags)
        return replace(self, args=args, **changes)


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes that the trainer needs on each GPU, by use; see the module docstring."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    copies: float
    inputs: float
    head: float
    uncounted: float
    in_engine: float = 0.0  # bytes that features add to each rank of the engine (its adapters), not to the trainer

    @property
    def total(self) -> float:
        """Return the bytes of a training step, without `uncounted` and `in_engine`."""
        return self.states + self.forward_and_backward

    @property
    def states(self) -> float:
        """Return the bytes that stay allocated from step to step."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def forward_and_backward(self) -> float:
        """Return the bytes that forward and backward need in addition to `states`."""
        return self.copies + self.inputs + self.head


def trainer_memory(outline: Outline, setup: Setup, recipe: FP8Recipe) -> TrainerMemory:
    """Return the memory of the trainer of a model, on each GPU."""
    args = setup.args
    gpus = setup.gpus
    is_sharded = gpus > 1
    has_lora = setup.lora_rank is not None
    tokens = args.per_device_train_batch_size * setup.tokens

    # 1. Weights and adapters, over all GPUs
    linears = {name: shape for name, shape in outline.linears.items() if name != "lm_head"}
    # A and B of each linear layer but the head, in FP32, whatever `lora_target_modules` selects
    adapter_bytes = 4 * (setup.lora_rank or 0) * sum(rows + columns for rows, columns in linears.values())
    dtype = setup.dtype
    if is_sharded and not has_lora:  # accelerate casts trained, sharded weights
        dtype = "float32"
    itemsize = BYTES[dtype]
    weight_bytes = itemsize * sum(map(prod, outline.parameters.values()))
    trained_bytes = adapter_bytes if has_lora else weight_bytes

    # 2. Sizes of the output head, and of linear layers and experts in all layers together
    matrices = [shape for shape in outline.parameters.values() if len(shape) == 2]
    # If the head is tied to the embedding, it is no linear layer of the outline, but the largest matrix
    vocabulary, hidden = outline.linears.get("lm_head") or max(matrices, key=prod)
    experts = tuple(f"{name}." for name in outline.experts)
    layer_parameters = 0
    for name, shape in outline.parameters.items():
        if name.removesuffix(".weight") in linears or name.startswith(experts):
            layer_parameters += prod(shape)

    # 3. Memory that only some setups need
    reference_bytes = 0.0
    if args.beta and not has_lora:  # with LoRA the reference is the policy with its adapters switched off
        reference_bytes = weight_bytes / gpus
    copied_bytes = 0
    if not is_sharded and not has_lora and dtype == "float32":
        copied_bytes = 2 * layer_parameters
    gathered_bytes = 0
    if is_sharded:  # FSDP2 gathers at most two matrices of the vocabulary's size and two layers at once, in BF16
        gathered_bytes = 2 * (2 * vocabulary * hidden + 2 * layer_parameters / outline.layers)
    input_itemsize = 2 if is_sharded else itemsize

    memory = TrainerMemory(
        weights=(weight_bytes + adapter_bytes) / gpus,
        gradients=trained_bytes / gpus,
        optimizer=2 * trained_bytes / gpus,
        reference=reference_bytes,
        copies=copied_bytes,
        inputs=tokens * hidden * outline.layers * input_itemsize,
        head=0 if has_lora else 4 * vocabulary * hidden,
        uncounted=CONTEXT_BYTES + SAVED_BYTES * hidden * tokens + gathered_bytes,
    )
    for group in args.groups():
        for field_name, change in group.memory_changes(args, setup, outline, recipe).items():
            memory = replace(memory, **{field_name: getattr(memory, field_name) + change})
    return memory


def engine_adapters(outline: Outline, rank: int) -> int:
    """Return the number of parameters in an engine's adapters. Every rank of the engine holds all of them.

    Args:
        rank: R, the LoRA rank of the policy's adapters.

    The engine fuses S linear layers of the policy into one with K in-features and N out-features. A of the fused layer
    is `[S R, K]`. B is `[N, S R]`, zero except for S blocks.
    """
    shapes_by_fused = defaultdict(list)  # name of a fused linear layer -> shapes [rows, K] of its S parts
    for name, shape in outline.linears.items():
        if name != "lm_head":
            shapes_by_fused[fused_name(name)].append(shape)
    parameters = 0
    for shapes in shapes_by_fused.values():
        in_features = shapes[0][1]
        out_features = sum(rows for rows, _ in shapes)
        parameters += rank * len(shapes) * (in_features + out_features)
    return parameters
