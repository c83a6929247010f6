"""Frozen layers of a policy that hold no weight: they compute with an engine's FP8 codes.

    forward     y = x @ W.T + bias, W dequantized for the call, in the dtype that the layer would have computed in
    backward    dX = dY @ W, W dequantized once more: no copy of a weight outlives a call

Modules stay the objects that they are (policy/swapped.py), so names, adapters and gradient checkpointing work as
before. A NaN of its shape stands in for a weight: PEFT and transformers read shapes, dtypes and devices, and a
computation with it would show. PEFT's merge into it raises an error that names the way.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchao.quantization import Float8Tensor

from trl_fp8.policy.swapped import HoldsCodes, holding, own_gradient, swap
from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.recipe.from_model import linear_layers
from trl_fp8.recipe.names import TRANSFORMERS, expert_modules
from trl_fp8.recipe.recipe import FP8Recipe


class AbsentWeight(Tensor):
    """Shape, dtype and device of a weight; its values are NaN."""

    def __iadd__(self, other: Tensor) -> Tensor:  # a merge of PEFT's
        raise ValueError(
            "fp8_base=True: the base's FP8 weights live in the engine, so that PEFT cannot merge adapters into them. "
            "Use trainer.merge_and_export(folder), which reads the original weights again, or trainer.save_model() "
            "and then PEFT's merge_and_unload() on the original model."
        )


def _held_or_absent(name: str) -> property:
    return property(lambda module: module._parameters.get(name, module.absent[name]))


class SharedLinear(HoldsCodes):
    """Mixin for an `nn.Linear` without a weight."""

    codes: Float8Tensor | None  # of the weight `[N, K]`
    absent: dict[str, Tensor]  # by the name of the parameter
    weight = _held_or_absent("weight")

    def forward(self, input: Tensor) -> Tensor:
        if self.codes is None:
            raise RuntimeError("fp8_base=True: the policy has no weights before its trainer's engine holds its base.")
        dtype = _computed_in(input)
        y = _DequantizedLinear.apply(input.to(dtype), self.codes)
        return y if self.bias is None else y + self.bias.to(dtype)


class SharedExperts(HoldsCodes):
    """Mixin for the module of all experts of a layer, `[E, N, K]` each, without weights."""

    codes: dict[str, Float8Tensor] | None
    absent: dict[str, Tensor]
    gate_up_proj, down_proj = map(_held_or_absent, TRANSFORMERS.fused)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        inputs = hidden_states.to(_computed_in(hidden_states)), top_k_index, top_k_weights
        return own_gradient(self.dequantized, self.dequantized, *inputs, dtype=inputs[0].dtype)

    def dequantized(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Call the module's own forward with dequantized weights, which are gone afterwards."""
        weights = {name: dequantize_weight(codes, hidden_states.dtype) for name, codes in self.codes.items()}
        with holding(self, weights):
            return super().forward(hidden_states, top_k_index, top_k_weights)


def fp8_weights(model: nn.Module, recipe: FP8Recipe) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (checkpoint name, module, name of its parameter) of each weight of a policy that is FP8."""
    for name, module in (*linear_layers(model), *expert_modules(model)):
        for parameter in _weight_names(module):
            if f"{name}.{parameter}" in recipe.fp8_tensors:
                yield f"{name}.{parameter}", module, parameter


def share(module: nn.Module) -> None:
    """Take the weights out of a linear layer, or out of all experts of a layer. Idempotent."""
    if not isinstance(module, HoldsCodes):
        absent = {}
        for name in _weight_names(module):
            weight = module._parameters.pop(name)
            device = "cpu" if weight.is_meta else weight.device  # a NaN needs a real one
            nan = torch.full((), torch.nan, dtype=weight.dtype, device=device)  # expanded, it takes no memory
            absent[name] = nan.expand(weight.shape).as_subclass(AbsentWeight)
        swap(module, SharedLinear if isinstance(module, nn.Linear) else SharedExperts, codes=None, absent=absent)


def _weight_names(module: nn.Module) -> tuple[str, ...]:
    return ("weight",) if isinstance(module, nn.Linear) else TRANSFORMERS.fused


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _DequantizedLinear(torch.autograd.Function):
    """Computes `x @ W.T` of x `[..., K]`, W dequantized for the call, and dX likewise."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Float8Tensor) -> Tensor:
        ctx.codes = codes
        return F.linear(x, dequantize_weight(codes, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ dequantize_weight(ctx.codes, dy.dtype), None
