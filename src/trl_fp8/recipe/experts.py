"""Mixture-of-experts layers as transformers 5 holds them: all experts of a layer in two 3-D parameters.

    model.layers.0.mlp.gate.weight             [E, K]      router: always in high precision
    model.layers.0.mlp.experts.gate_up_proj    [E, 2I, K]  of each expert the gate's rows, then the up projection's
    model.layers.0.mlp.experts.down_proj       [E, K, I]

Shape letters: E experts, I intermediate size of one expert, K hidden size. Other names for them: `names.py`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trl_fp8.quantization.formats.spec import FormatSpec

from .names import checkpoint_name, full_shape
from .outline import Outline


if TYPE_CHECKING:
    from torch import nn


NOWHERE = -1  # in place of an expert's number: for this token and layer no route is known


def expert_modules(model: "nn.Module") -> Iterator[tuple[str, "nn.Module"]]:
    """Modules that hold the experts of one layer, by checkpoint name."""
    for name, module in model.named_modules():
        is_experts = checkpoint_name(name).rpartition(".")[2] == "experts"
        if is_experts and any(len(full_shape(parameter)) == 3 for parameter in module.parameters(recurse=False)):
            yield checkpoint_name(name), module


def router_name(experts: str) -> str:
    """Checkpoint name of the router in front of the experts `...mlp.experts`."""
    return f"{experts.rpartition('.')[0]}.gate"


def is_router(module: "nn.Module") -> bool:
    """True for routers that choose experts by one top-k, as in Qwen2-MoE, Qwen3-MoE, Mixtral and OLMoE."""
    return type(module).__name__.endswith("TopKRouter")


def why_not_fp8(outline: Outline, experts: str, spec: FormatSpec, tensor_parallel_size: int) -> str | None:
    """Why an engine cannot hold a module of experts in a format, or None if it can."""
    if spec.why_no_experts:
        return spec.why_no_experts
    if not outline.experts[experts]:
        return "experts of another layout than gate_up_proj [E, 2I, K] and down_proj [E, K, I]"
    _, hidden, intermediate = outline.parameters[f"{experts}.down_proj"]
    intermediate /= tensor_parallel_size
    if not spec.fits(intermediate, hidden):
        at = f" per rank at tensor parallel size {tensor_parallel_size}" if tensor_parallel_size > 1 else ""
        return f"experts of {intermediate:g} x {hidden}{at}, not multiples of {spec.alignment}"
    return None
