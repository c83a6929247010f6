"""Replacements, in place, of what a policy computes: in a module (`swap`), in one function (`own_gradient`), in its
output head (`scored_by`).

`swap` exchanges the class of a module. The module stays the same object and keeps its parameters, names, state dict,
hooks, PEFT wrappers and sharding.

`own_gradient` returns the engine's value with the gradient of the policy's own function, a straight-through estimator.
It serves all operations except large GEMMs.

    forward    y = engine(x)                                  with the engine's tensors; only x is saved
    backward   d policy(x, parameters) / d (x, parameters)    by the policy's own, unquantized computation, in FP32

The backward runs the policy's forward once more. That is cheap for norms, rotary embeddings and activation functions;
for experts there is no cheaper way. Linear layers, attention and the output head have their own backwards.

All log-probs come from TRL's fused output head, or from a function that replaces it (`scored_by`). TRL's head never
has the logits of all tokens in memory: it computes and reduces them tile by tile. A replacement computes them for
`TOKENS_AT_A_TIME` tokens at once, and may take the logits from elsewhere (`Feature.logits`).

Shape letters: T tokens, K hidden size, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.codec.e4m3 import PassGradient
from trl_fp8.upstream.patches import substituted


TOKENS_AT_A_TIME = 256  # tokens whose logits over the whole vocabulary are in memory at once

# (the head's weight `[V, K]`, its bias `[V]` or None) -> function from hidden states `[T, K]` to logits `[T, V]`
Logits = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
Outputs = Tensor | tuple[Tensor, ...]


class HoldsCodes:
    """Mixin for a linear layer, or for the experts of a layer, without weights of its own. It computes with FP8 codes
    that an engine has in memory.

    Experts also have a method `dequantized`: their forward with weights that are dequantized for the call, in the
    dtype of the hidden states.
    """

    # Codes of a linear layer, or of experts by name of the parameter; None: the engine does not have the codes yet
    codes: Float8Tensor | dict[str, Float8Tensor] | None


class Swapper:
    """Base of an object that has swapped modules of a policy. Each such module has the object as an attribute."""

    @abstractmethod
    def remove(self) -> None:
        """Give the modules their own classes back."""


def release(model: nn.Module) -> None:
    """Undo the swaps that an earlier trainer left in the policy, whose modules would still call its engine."""
    for module in list(model.modules()):
        swappers = [value for value in vars(module).values() if isinstance(value, Swapper)]
        for swapper in swappers:
            swapper.remove()


def swap(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Give `module` a class with the bases `mixin` and its own class (`before`), and set `attributes` on it."""
    module.__class__ = _swapped(mixin, type(module), tuple(attributes))
    module.__dict__.update(attributes)


def restore(module: nn.Module) -> None:
    """Undo `swap`."""
    cls = type(module)
    for name in cls.attributes:
        module.__dict__.pop(name, None)
    module.__class__ = cls.before


@cache
def _swapped(mixin: type, cls: type[nn.Module], attributes: tuple[str, ...]) -> type:
    """Return a subclass of `mixin` and `cls`. It has what `restore` and `_as_before` need as class attributes."""
    members = {"__module__": cls.__module__, "__reduce_ex__": _as_before, "before": cls, "attributes": attributes}
    return type(f"Followed{cls.__name__}", (mixin, cls), members)


def _as_before(module: nn.Module, protocol: int) -> tuple:
    """Copy or pickle a module as its original class, because the copy's weights are not those of an engine."""
    cls = type(module)
    state = {name: value for name, value in vars(module).items() if name not in cls.attributes}
    return _empty, (cls.before,), state


def _empty(cls: type[nn.Module]) -> nn.Module:
    # `copyreg.__newobj__` would do the same, but pickle accepts it only with the object's present class
    return cls.__new__(cls)


def own_gradient(
    engine: Callable[..., Outputs],
    policy: Callable[..., Outputs],
    *inputs: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Outputs:
    """Return `engine(*inputs)` with the gradients of `policy(*inputs)` in `dtype`; outputs have the same shapes."""
    return _OwnGradient.apply(engine, policy, dtype, *inputs)


def with_value(own: Tensor, value: Tensor) -> Tensor:
    """Return `value` in the dtype of `own`. The gradient of the result goes to `own`."""
    return PassGradient.apply(own, lambda own: value.detach().to(own.dtype))


@contextmanager
def holding(module: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Replace the module's parameters by these tensors inside the block."""
    before = dict(module._parameters)
    try:
        module._parameters.update(parameters)
        yield
    finally:
        module._parameters.clear()
        module._parameters.update(before)


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, engine, policy, dtype, *inputs):
        ctx.policy = policy
        ctx.dtype = dtype
        ctx.save_for_backward(*inputs)
        return engine(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        saved = ctx.saved_tensors
        is_needed = ctx.needs_input_grad[3:]  # without engine, policy and dtype
        # 1. Run the policy's own forward once more, in `dtype`
        inputs = list(saved)
        for number, tensor in enumerate(saved):
            if tensor.is_floating_point():
                inputs[number] = tensor.detach().to(ctx.dtype).requires_grad_(is_needed[number])
        with torch.enable_grad(), torch.autocast(gradients[0].device.type, enabled=False):
            outputs = ctx.policy(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # 2. Compute the gradients of the inputs that need one
        differentiable = []
        output_gradients = []
        for output, gradient in zip(outputs, gradients, strict=True):
            if output.requires_grad:
                differentiable.append(output)
                output_gradients.append(gradient.to(output.dtype))
        needed = [number for number, need in enumerate(is_needed) if need]
        needed_inputs = [inputs[number] for number in needed]
        computed = torch.autograd.grad(differentiable, needed_inputs, output_gradients, allow_unused=True)
        # 3. Return a gradient, or None, for each argument of `forward`
        input_gradients = [None] * len(saved)
        for number, gradient in zip(needed, computed, strict=True):
            if gradient is not None:
                input_gradients[number] = gradient.to(saved[number].dtype)
        return None, None, None, *input_gradients


def scored_by(head: object) -> AbstractContextManager[None]:
    """Replace TRL's fused output head by `head` inside the block. TRL calls only `head.apply`."""
    return substituted(trl_utils, "_ChunkedLogProbFunction", head)
