"""Bytes that one forward takes of each GPU, for a plan.

The backward computes each MLP's act(gate) * up once more, in FP32 (policy/own_gradient.py): seven tensors
`[tokens, intermediate]` at once, eight where gate and up are one linear. Of experts it takes the weights of a layer in
BF16, and makes their gradients in BF16 before they become FP32. A reference has its weights once more, as the engine
holds the policy's: in codes, scales and BF16.
"""

from collections import defaultdict
from math import prod

from trl_fp8.planning.trainer_memory import BYTES, Setup, engine_adapters
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe


# Bytes that the backward has of an MLP at once, per token and element of its width: 7 and 8 FP32 tensors
RECOMPUTED = {"gate_proj": 28, "gate_up_proj": 32}


def recomputed_bytes(outline: Outline, setup: Setup) -> float:
    """Return the bytes that a backward needs for an MLP, or for the experts of a layer if that is more."""
    widths, experts = [0], defaultdict(int)
    for name, (rows, _) in outline.linears.items():
        kind = name.rpartition(".")[2]
        if kind in RECOMPUTED:  # a fused one has the rows of both
            widths.append(RECOMPUTED[kind] * (rows // 2 if kind == "gate_up_proj" else rows))
    for name, shape in outline.parameters.items():
        for module in outline.experts:
            if name.startswith(f"{module}."):
                experts[module] += prod(shape)
    copy = 2 if BYTES[setup.dtype] == 4 else 0
    gradients = 0 if setup.lora_rank else 2 + copy * 2  # in BF16, and as the weights are
    tokens = setup.args.per_device_train_batch_size * setup.tokens
    return max(tokens * max(widths), (copy + gradients) * max(experts.values(), default=0))


def reference_bytes(outline: Outline, setup: Setup, recipe: FP8Recipe) -> int:
    """Return the bytes of a reference as an engine holds it: what its kernels read, and the policy trains."""
    if setup.args.base_in_engine:
        return 2 * engine_adapters(outline, setup.lora_rank)
    read = dict(outline.parameters)
    if "lm_head.weight" in read:  # else the head reads the embedding
        del read[next(name for name in read if name.endswith("embed_tokens.weight"))]
    codes = sum(recipe.format.weight_bytes(shape) for name, shape in read.items() if name in recipe.fp8_tensors)
    return codes + 2 * sum(prod(shape) for name, shape in read.items() if name not in recipe.fp8_tensors)
