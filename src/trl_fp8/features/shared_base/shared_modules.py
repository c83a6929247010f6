"""Frozen layers of a policy that hold no weight and compute with an engine's FP8 codes.

    forward     y = x @ W.T + bias, with W dequantized for the call, in the dtype in which the layer would compute
    backward    dX = dY @ W, with W dequantized once more, because no copy of a weight outlives a call

`share` makes such a layer from a module with weights. The module stays the same object (policy/swapped.py), so names,
adapters and gradient checkpointing work as before. In place of a weight it gets a placeholder: a NaN, expanded to the
weight's shape. PEFT and transformers read the placeholder's shape, dtype and device. A computation with it would give
NaN. If PEFT merges an adapter into it, an error says what to call instead.
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
    """Placeholder with the shape, dtype and device of a weight; its values are NaN."""

    def __iadd__(self, other: Tensor) -> Tensor:  # PEFT's merge
        raise ValueError(
            "fp8_base=True: the base's FP8 weights exist only in the engine, so PEFT cannot merge adapters into them. "
            "Use trainer.merge_and_export(folder), which reads the original weights again, or trainer.save_model() "
            "and then PEFT's merge_and_unload() on the original model."
        )


def _parameter_or_absent(name: str) -> property:
    """Return a property for the weight `name` of a layer without weights.

    Its value is the weight that `holding` sets as a parameter for a call, and otherwise the placeholder.
    """

    def parameter_or_absent(module: nn.Module) -> Tensor:
        return module._parameters.get(name, module.absent[name])

    return property(parameter_or_absent)


class SharedLinear(HoldsCodes):
    """Mixin for an `nn.Linear` without a weight."""

    codes: Float8Tensor | None  # codes of the weight `[N, K]`; None before the engine has the base
    absent: dict[str, Tensor]  # name of a parameter -> its placeholder
    weight = _parameter_or_absent("weight")

    def forward(self, input: Tensor) -> Tensor:
        _require_codes(self)
        dtype = _compute_dtype(input)
        y = _DequantizedLinear.apply(input.to(dtype), self.codes)
        return y if self.bias is None else y + self.bias.to(dtype)


class SharedExperts(HoldsCodes):
    """Mixin for the module of all experts of a layer, without its two weights `[E, N, K]`."""

    codes: dict[str, Float8Tensor] | None  # by name of a parameter; None before the engine has the base
    absent: dict[str, Tensor]  # name of a parameter -> its placeholder
    gate_up_proj = _parameter_or_absent("gate_up_proj")  # the two names in `TRANSFORMERS.fused`
    down_proj = _parameter_or_absent("down_proj")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        dtype = _compute_dtype(hidden_states)
        inputs = hidden_states.to(dtype), top_k_index, top_k_weights
        # The backward calls `dequantized` once more, so autograd keeps no dequantized weight
        return own_gradient(self.dequantized, self.dequantized, *inputs, dtype=dtype)

    def dequantized(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Call the module's own forward with weights that are dequantized for this call."""
        _require_codes(self)
        weights = {name: dequantize_weight(codes, hidden_states.dtype) for name, codes in self.codes.items()}
        with holding(self, weights):
            return super().forward(hidden_states, top_k_index, top_k_weights)


def fp8_weights(model: nn.Module, recipe: FP8Recipe) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (checkpoint name, module, name of the module's parameter) of each FP8 weight of a policy."""
    for name, module in (*linear_layers(model), *expert_modules(model)):
        for parameter in _weight_names(module):
            if f"{name}.{parameter}" in recipe.fp8_tensors:
                yield f"{name}.{parameter}", module, parameter


def share(module: nn.Module) -> None:
    """Replace the weights of a linear layer, or of all experts of a layer, by placeholders. Idempotent."""
    if isinstance(module, HoldsCodes):
        return
    absent = {}
    for name in _weight_names(module):
        weight = module._parameters.pop(name)
        device = "cpu" if weight.is_meta else weight.device  # on the meta device there is no NaN
        nan = torch.full((), torch.nan, dtype=weight.dtype, device=device)
        absent[name] = nan.expand(weight.shape).as_subclass(AbsentWeight)  # `expand` takes no memory
    mixin = SharedLinear if isinstance(module, nn.Linear) else SharedExperts
    swap(module, mixin, codes=None, absent=absent)


def _weight_names(module: nn.Module) -> tuple[str, ...]:
    return ("weight",) if isinstance(module, nn.Linear) else TRANSFORMERS.fused


def _require_codes(module: HoldsCodes) -> None:
    if module.codes is None:
        raise RuntimeError("fp8_base=True: the policy has no weights before its trainer's engine holds its base.")


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes for the input `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _DequantizedLinear(torch.autograd.Function):
    """Computes `x @ W.T` for x `[..., K]`, and dX in the backward. Both forward and backward dequantize W anew."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Float8Tensor) -> Tensor:
        ctx.codes = codes
        return F.linear(x, dequantize_weight(codes, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ dequantize_weight(ctx.codes, dy.dtype), None
