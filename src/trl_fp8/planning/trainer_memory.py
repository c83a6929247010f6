"""Bytes that TRL's trainer takes of each GPU, by the defaults of TRL 1.16 and transformers 5.17.

    weights     FP32 (TRL's default for `dtype`), divided over all GPUs under FSDP2 or ZeRO-3. There trained weights
                are FP32, however they were loaded: accelerate casts them up under mixed precision
    gradients   as the weights; Adam's two moments, too. With LoRA only of the adapters, which are FP32
    copies      BF16 copies of FP32 weights of linear layers, which autocast makes and keeps through a forward. Only on
                one GPU: FSDP2 gathers a layer at a time. Not of frozen weights, whose copies are not kept
    inputs      of each layer, which checkpointing keeps; FP32 on one GPU, BF16 under FSDP2's mixed precision
    head        the gradient of the output head, which TRL's chunked log-probs add up in FP32 on every rank. Logits
                never exist as a whole
    uncounted   transient memory, not in the total: what a layer saves of each token while its backward runs, gathered
                weights, gradients of activations, the CUDA context, fragmentation. A plan leaves a share of each GPU
                free for it (`capacity.FREE`), or as much as this if it is more

A feature adds what it changes by `FlagGroup.memory_changes`.
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
# Bytes that a layer saves for its backward, per token and hidden element. Counted in a layer of Qwen3 whose MLP is
# three times as wide as the hidden size: 53 in BF16, 64 under autocast from FP32
SAVED = 64


@dataclass(frozen=True)
class Setup:
    """A training run and the GPUs that it is planned for. None: the plan chooses."""

    args: Any  # the config, an `FP8GRPOConfig`
    tokens: int = 4096  # of a sequence, prompt and completion
    completions: int = 256  # of a generation, on all GPUs
    gpus: int = 1  # the trainer's states are divided over all of them
    gpu_bytes: float = 80 * GIB
    lora_rank: int | None = None  # None: all weights are trained
    dtype: str = "float32"  # of the policy's weights
    tensor_parallel_size: int | None = None
    utilization: float | None = None  # vllm_gpu_memory_utilization, the engine's share of a GPU
    run_config: Mapping[str, object] | None = None  # its lines; None without one

    def with_flags(self, flags: Mapping[str, Any], **changes: Any) -> "Setup":
        """Return a copy whose config has other `flags`."""
        args = copy(self.args)
        vars(args).update(flags)
        return replace(self, args=args, **changes)


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on each GPU."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    copies: float
    inputs: float
    head: float
    uncounted: float
    in_engine: float = 0.0  # what features put on each rank of an engine beside its weights

    @property
    def total(self) -> float:
        return self.states + self.passing

    @property
    def states(self) -> float:
        """Return the bytes that stay from step to step."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def passing(self) -> float:
        """Return the bytes that a forward and backward need in addition."""
        return self.copies + self.inputs + self.head


def trainer_memory(outline: Outline, setup: Setup, recipe: FP8Recipe) -> TrainerMemory:
    """Return the memory of a model's trainer beside an engine."""
    args, gpus = setup.args, setup.gpus
    is_sharded = gpus > 1
    linears = {name: shape for name, shape in outline.linears.items() if name != "lm_head"}
    # Bytes of A and B of each linear layer (`all-linear`), in FP32
    adapters = 4 * (setup.lora_rank or 0) * sum(rows + columns for rows, columns in linears.values())
    size = BYTES["float32" if is_sharded and not adapters else setup.dtype]
    weights = size * sum(map(prod, outline.parameters.values()))
    trained = adapters or weights
    # The shape of the output head, or of the embedding that it is tied to
    matrices = [shape for shape in outline.parameters.values() if len(shape) == 2]
    vocabulary, hidden = outline.linears.get("lm_head") or max(matrices, key=prod)
    experts = tuple(f"{name}." for name in outline.experts)
    in_layers = 0
    for name, shape in outline.parameters.items():
        if name.removesuffix(".weight") in linears or name.startswith(experts):
            in_layers += prod(shape)
    # In BF16: two matrices of the vocabulary's size, and two layers
    gathered = 2 * (2 * vocabulary * hidden + 2 * in_layers / outline.layers) if is_sharded else 0
    tokens = args.per_device_train_batch_size * setup.tokens
    memory = TrainerMemory(
        weights=(weights + adapters) / gpus,
        gradients=trained / gpus,
        optimizer=2 * trained / gpus,
        reference=weights / gpus if args.beta and not adapters else 0.0,  # adapters are switched off for it
        copies=0 if is_sharded or adapters or size == 2 else 2 * in_layers,
        inputs=tokens * hidden * outline.layers * (2 if is_sharded else size),
        head=0 if adapters else 4 * vocabulary * hidden,
        uncounted=CONTEXT_BYTES + SAVED * hidden * tokens + gathered,
    )
    for group in args.groups():
        changes = group.memory_changes(args, setup, outline, recipe)
        memory = replace(memory, **{part: getattr(memory, part) + size for part, size in changes.items()})
    return memory


def engine_adapters(outline: Outline, rank: int) -> int:
    """Return the number of parameters in the adapters of an engine, which every rank holds whole.

    For a layer that fuses S of the policy's, A is `[S R, K]` and B `[N, S R]`, which is zero but for S blocks.
    """
    fused = defaultdict(list)
    for name, shape in outline.linears.items():
        if name != "lm_head":
            fused[fused_name(name)].append(shape)
    return sum(rank * len(parts) * (sum(rows for rows, _ in parts) + parts[0][1]) for parts in fused.values())
