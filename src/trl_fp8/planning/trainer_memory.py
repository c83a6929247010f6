"""Bytes that TRL's trainer takes of each GPU, as TRL 1.16 and transformers 5.17 train unless told otherwise.

    weights     FP32 (TRL loads models so; `dtype` says otherwise), over all GPUs under FSDP2 or ZeRO-3. What is
                trained is FP32 there whatever it was loaded as: accelerate casts it up under mixed precision
    gradients   as the weights; Adam's two moments, too. With LoRA only of the adapters, which are FP32
    copies      autocast casts each weight of a linear layer to BF16 and keeps it through a forward, on one GPU and in
                FP32 alone: FSDP2 gathers a layer at a time, and frozen weights are not kept
    inputs      of each layer, which checkpointing keeps; FP32 on one GPU, BF16 under FSDP2's mixed precision
    head        the gradient of the output head, which TRL's chunked log-probs add up in FP32 on every rank. Logits are
                never there as a whole

What passes is not in the total: what a layer saves of each token while its backward runs, weights that are gathered,
gradients of activations, the CUDA context, fragmentation. Plans leave a share of each GPU free for it
(`capacity.FREE`), and more where `uncounted` is more.
"""

from dataclasses import dataclass
from math import prod

from trl_fp8.recipe.outline import Outline


BYTES = {"float32": 4, "bfloat16": 2}
CONTEXT_BYTES = 2 * 2**30
# Bytes a layer saves for its backward, per token and hidden element: counted in Qwen3's with an MLP of three times
# the hidden size, 53 in BF16 and 64 under autocast from FP32
SAVED = 64


@dataclass(frozen=True)
class Training:
    """How a policy is trained."""

    gpus: int = 1  # its states are divided over all of them
    lora_rank: int | None = None  # None: all weights are trained
    dtype: str = "float32"  # of the policy's weights
    sequences: int = 1  # per_device_train_batch_size
    tokens: int = 4096  # of a sequence, prompt and completion
    has_reference: bool = False  # beta > 0: a frozen copy of the policy, which LoRA does without


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

    @property
    def total(self) -> float:
        return self.states + self.passing

    @property
    def states(self) -> float:
        """What stays from step to step."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def passing(self) -> float:
        """What a forward and backward need beside."""
        return self.copies + self.inputs + self.head


def trainer_memory(outline: Outline, training: Training) -> TrainerMemory:
    """The memory of a trainer of a model."""
    sharded, size = training.gpus > 1, BYTES[training.dtype]
    if sharded and not training.lora_rank:
        size = BYTES["float32"]
    parameters = sum(map(prod, outline.parameters.values()))
    adapters = training.lora_rank * adapter_width(outline) if training.lora_rank else 0
    trained = 4 * adapters if training.lora_rank else size * parameters
    vocabulary, hidden = head_shape(outline)
    kept = training.sequences * training.tokens * hidden * outline.layers
    return TrainerMemory(
        weights=(size * parameters + 4 * adapters) / training.gpus,
        gradients=trained / training.gpus,
        optimizer=2 * trained / training.gpus,
        reference=size * parameters / training.gpus if training.has_reference and not adapters else 0,
        copies=0 if sharded or adapters or size == 2 else 2 * _in_layers(outline),
        inputs=kept * (2 if sharded else size),
        head=0 if adapters else 4 * vocabulary * hidden,
        uncounted=CONTEXT_BYTES + _layer_bytes(outline, training, hidden),
    )


def _layer_bytes(outline: Outline, training: Training, hidden: int) -> float:
    """What a layer's backward needs: what its forward saves, and gathered weights of it, embedding and head."""
    vocabulary, _ = head_shape(outline)
    gathered = 2 * (2 * vocabulary * hidden + 2 * _in_layers(outline) / outline.layers) if training.gpus > 1 else 0
    return SAVED * hidden * training.sequences * training.tokens + gathered


def adapter_width(outline: Outline) -> int:
    """Parameters of LoRA adapters of rank 1 on all linear layers but the output head, as `all-linear` means."""
    return sum(rows + columns for name, (rows, columns) in outline.linears.items() if name != "lm_head")


def head_shape(outline: Outline) -> tuple[int, int]:
    """Vocabulary and hidden size: those of the output head, or of the embedding where it is called something else."""
    matrices = [shape for shape in outline.parameters.values() if len(shape) == 2]
    return outline.linears.get("lm_head") or max(matrices, key=prod)


def _in_layers(outline: Outline) -> int:
    """Parameters of the linear layers and experts, without output head."""
    kept = {f"{name}.weight" for name in outline.linears if name != "lm_head"}
    experts = tuple(f"{name}." for name in outline.experts)
    found = (shape for name, shape in outline.parameters.items() if name in kept or name.startswith(experts))
    return sum(map(prod, found))
