"""Parts of a policy that are computed in another way, in place: its modules, one function's value, its output head.

Modules stay the objects they are, and only their class is exchanged (`swap`). So parameters, names, state dict, hooks,
PEFT wrappers and sharding stay as they are.

`own_gradient` is the engine's value with the policy's own gradient: what straight-through means for anything but a
large GEMM.

    forward    y = engine(x)                                  on the engine's tensors; x is all that is kept
    backward   d policy(x, parameters) / d (x, parameters)    of the policy's own, unquantized computation, in FP32

The backward computes the policy's forward once more. That is cheap for norms, rotary embeddings and activation
functions, and experts have nothing cheaper. Linear layers, attention and the output head have their own backwards.

The output head is the one place where log-probs are made, by TRL's fused function or by another (`scored_by`). TRL's
never makes the logits of all tokens at once: it projects and folds them tile by tile. What scores in its place does
the same, `TOKENS` at a time, and may take its logits from elsewhere (`Feature.logits`).

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

from trl_fp8.upstream.patches import substituted


TOKENS = 256  # whose logits over the whole vocabulary are in memory at a time

# The policy's weight `[V, K]` and bias `[V]` or None -> what makes logits `[T, V]` of hidden states `[T, K]`
Logits = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
Outputs = Tensor | tuple[Tensor, ...]


class HoldsCodes:
    """Mixed into the class of a linear layer, or of all experts of a layer, that holds no weight: it computes with its
    FP8 codes, which an engine keeps.

    Experts also have `dequantized`, their forward with weights that are dequantized for the call, in the dtype of the
    hidden states.
    """

    codes: Float8Tensor | dict[str, Float8Tensor] | None  # of experts by parameter; None until the engine holds them


class Swapper:
    """Base of an object that swapped modules of a policy and is an attribute of each of them."""

    @abstractmethod
    def remove(self) -> None:
        """Turn the modules back into what they were."""


def release(model: nn.Module) -> None:
    """Undo what a `Swapper` of an earlier trainer left in the policy, which would compute as that trainer's engine."""
    for module in list(model.modules()):
        for swapper in [value for value in vars(module).values() if isinstance(value, Swapper)]:
            swapper.remove()


def swap(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Put `mixin` before the class of `module`, which it can call by `self.before`, and give it `attributes`."""
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
    members = {"__module__": cls.__module__, "__reduce_ex__": _as_before, "before": cls, "attributes": attributes}
    return type(f"Followed{cls.__name__}", (mixin, cls), members)


def _as_before(module: nn.Module, protocol: int) -> tuple:
    """Copy or pickle a module as the class that it was: the copy's weights are not those of an engine."""
    cls = type(module)
    return _empty, (cls.before,), {name: value for name, value in vars(module).items() if name not in cls.attributes}


def _empty(cls: type[nn.Module]) -> nn.Module:
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
    """Return `value`, whose gradient goes to `own`."""
    return _WithValue.apply(own, value)


@contextmanager
def holding(module: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Give the module these tensors in place of its parameters inside the block."""
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
        ctx.policy, ctx.dtype = policy, dtype
        ctx.save_for_backward(*inputs)
        return engine(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        needed, saved = ctx.needs_input_grad[3:], ctx.saved_tensors
        inputs = [
            tensor.detach().to(ctx.dtype).requires_grad_(need) if tensor.is_floating_point() else tensor
            for tensor, need in zip(saved, needed, strict=True)
        ]
        kind = gradients[0].device.type
        with torch.enable_grad(), torch.autocast(kind, enabled=False):
            outputs = ctx.policy(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(out, dy.to(out.dtype)) for out, dy in zip(outputs, gradients, strict=True) if out.requires_grad]
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        values, dys = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(values, wanted, dys, allow_unused=True))
        returned = []
        for tensor, need in zip(saved, needed, strict=True):
            gradient = next(found) if need else None
            returned.append(None if gradient is None else gradient.to(tensor.dtype))
        return None, None, None, *returned


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, value):
        return value.to(own.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def scored_by(head: object) -> AbstractContextManager[None]:
    """Let `head` score inside the block in place of TRL's function, of which only `apply` is called."""
    return substituted(trl_utils, "_ChunkedLogProbFunction", head)
