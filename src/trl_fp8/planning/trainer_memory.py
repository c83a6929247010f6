"""Bytes that TRL's trainer takes of each GPU, as TRL 1.16 and transformers 5.17 train unless told otherwise.

    weights     FP32 (TRL loads models so; `dtype` says otherwise), over all GPUs under FSDP2 or ZeRO-3. What is
                trained is FP32 there whatever it was loaded as: accelerate casts it up under mixed precision
    gradients   as the weights; Adam's two moments, too. With LoRA only of the adapters, which are FP32
    copies      autocast casts each weight of a linear layer to BF16 and keeps it through a forward, on one GPU and in
                FP32 alone: FSDP2 gathers a layer at a time, and frozen weights are not kept
    inputs      of each layer, which checkpointing keeps; FP32 on one GPU, BF16 under FSDP2's mixed precision
    head        the gradient of the output head, which TRL's chunked log-probs add up in FP32 on every rank. Logits are
                never there as a whole

On a shared FP8 base (`fp8_base`) the engine has the FP8 weights and the trainer the rest of the model, in BF16 unless
`dtype` says otherwise. Beside an engine that is split over ranks the trainer has codes and scales of its own, all of
them on each GPU. With one forward a reference has its weights once more, as the engine holds the policy's: in codes,
scales and BF16, on each GPU.

What passes is not in the total: what a layer saves of each token while its backward runs, weights that are gathered,
the largest weight of an FP8 base in BF16, gradients of activations, the CUDA context, fragmentation. Plans leave a
share of each GPU free for it (`capacity.FREE`), and more where `uncounted` is more.

With one forward the backward computes each MLP's act(gate) * up once more, in FP32 (policy/own_gradient.py): seven
tensors `[tokens, intermediate]` at once, eight where gate and up are one linear. Of experts it takes the weights
of a layer in BF16, and makes their gradients in BF16 before they become FP32.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from trl_fp8.recipe.names import fused_name
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe


BYTES = {"float32": 4, "bfloat16": 2}
CONTEXT_BYTES = 2 * 2**30
# Bytes a layer saves for its backward, per token and hidden element: counted in Qwen3's with an MLP of three times
# the hidden size, 53 in BF16 and 64 under autocast from FP32
SAVED = 64
# Bytes that one forward's backward has of an MLP at once, per token and element of its width: 7 and 8 FP32 tensors
RECOMPUTED = {"gate_proj": 28, "gate_up_proj": 32}


@dataclass(frozen=True)
class Training:
    """How a policy is trained."""

    gpus: int = 1  # its states are divided over all of them
    lora_rank: int | None = None  # None: all weights are trained
    dtype: str = "float32"  # of the policy's weights
    sequences: int = 1  # per_device_train_batch_size
    tokens: int = 4096  # of a sequence, prompt and completion
    has_reference: bool = False  # beta > 0; a frozen copy of the policy, which LoRA does without
    fp8_base: bool = False  # adapters on FP8 weights that are the engine's, too


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


def trainer_memory(
    outline: Outline, training: Training, recipe: FP8Recipe, one_forward: bool = False
) -> TrainerMemory:
    """The memory of a trainer of a model beside an engine; with `one_forward` it calls the engine's kernels."""
    sharded, size = training.gpus > 1, BYTES[training.dtype]
    if sharded and not training.lora_rank:
        size = BYTES["float32"]
    shared = {name: outline.parameters[name] for name in recipe.fp8_tensors} if training.fp8_base else {}
    parameters = sum(map(prod, outline.parameters.values())) - sum(map(prod, shared.values()))
    own_codes = sum(map(recipe.format.weight_bytes, shared.values())) if recipe.tensor_parallel_size > 1 else 0
    adapters = training.lora_rank * adapter_width(outline) if training.lora_rank else 0
    trained = 4 * adapters if training.lora_rank else size * parameters
    vocabulary, hidden = head_shape(outline)
    kept = training.sequences * training.tokens * hidden * outline.layers
    reference = 0.0
    if training.has_reference:
        reference += 0 if adapters else size * parameters / training.gpus
        reference += _in_engine(outline, training, recipe) if one_forward else 0
    return TrainerMemory(
        weights=(size * parameters + 4 * adapters) / training.gpus + own_codes,
        gradients=trained / training.gpus,
        optimizer=2 * trained / training.gpus,
        reference=reference,
        copies=0 if sharded or adapters or size == 2 else 2 * _in_layers(outline),
        inputs=kept * (2 if sharded else size),
        head=0 if adapters else 4 * vocabulary * hidden,
        uncounted=CONTEXT_BYTES
        + _layer_bytes(outline, training, shared)
        + (_recomputed_bytes(outline, training) if one_forward else 0),
    )


def _in_engine(outline: Outline, training: Training, recipe: FP8Recipe) -> int:
    """What of a reference is kept as an engine holds it: what its kernels read, and the policy trains."""
    if recipe.tensor_parallel_size > 1:
        return 0  # layers quantize for each pass what is gathered for it
    if training.fp8_base:
        return 2 * engine_adapters(outline, training.lora_rank)
    read = dict(outline.parameters)
    if "lm_head.weight" in read:  # else the head reads the embedding
        del read[next(name for name in read if name.endswith("embed_tokens.weight"))]
    codes = {name: shape for name, shape in read.items() if name in recipe.fp8_tensors}
    kept = (shape for name, shape in read.items() if name not in codes)
    return sum(map(recipe.format.weight_bytes, codes.values())) + 2 * sum(map(prod, kept))


def _layer_bytes(outline: Outline, training: Training, shared: Mapping[str, tuple[int, ...]]) -> float:
    """What a layer's backward needs: what its forward saves, gathered weights of it, embedding and head, and of a
    shared base the largest weight, dequantized.
    """
    vocabulary, hidden = head_shape(outline)
    in_layers = _in_layers(outline) - sum(map(prod, shared.values()))
    gathered = 2 * (2 * vocabulary * hidden + 2 * in_layers / outline.layers) if training.gpus > 1 else 0
    fused = Counter()
    for name, shape in shared.items():
        fused[fused_name(name.removesuffix(".weight"))] += 2 * prod(shape)
    dequantized = max(fused.values(), default=0)
    return SAVED * hidden * training.sequences * training.tokens + gathered + dequantized


def _recomputed_bytes(outline: Outline, training: Training) -> float:
    """What one forward's backward needs for an MLP, or the experts of a layer, where that is more."""
    tokens = training.sequences * training.tokens
    widths = [0]
    for name, (rows, _) in outline.linears.items():
        kind = name.rpartition(".")[2]
        if kind in RECOMPUTED:  # a fused one has the rows of both
            widths.append(RECOMPUTED[kind] * (rows // 2 if kind == "gate_up_proj" else rows))
    layers = defaultdict(int)
    for name, shape in outline.parameters.items():
        if module := next((each for each in outline.experts if name.startswith(f"{each}.")), None):
            layers[module] += prod(shape)
    size = BYTES[training.dtype]
    copy = 2 if size == 4 else 0
    gradients = 0 if training.lora_rank else 2 + copy * 2  # in BF16, and as the weights are
    return max(tokens * max(widths), (copy + gradients) * max(layers.values(), default=0))


def engine_adapters(outline: Outline, rank: int) -> int:
    """Parameters of the adapters that an engine computes beside its linear layers: where it has fused S of the
    policy's, A is [S R, K] and B [N, S R], of which (S - 1) / S are zeros. On every rank as if it held them whole.
    """
    fused = defaultdict(list)
    for name, shape in outline.linears.items():
        if name != "lm_head":
            fused[fused_name(name)].append(shape)
    return sum(rank * len(parts) * (sum(rows for rows, _ in parts) + parts[0][1]) for parts in fused.values())


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
