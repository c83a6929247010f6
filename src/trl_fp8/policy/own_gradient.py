"""The engine's value with the policy's own gradient: what straight-through means for anything but a large GEMM.

    forward    y = engine(x)                                  on the engine's tensors; x is all that is kept
    backward   d policy(x, parameters) / d (x, parameters)    of the policy's own, unquantized computation, in FP32

The backward computes the policy's forward once more. For norms, rotary embeddings and activation functions that is
cheap, experts have nothing cheaper; linear layers, attention and the output head have backwards of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


Outputs = Tensor | tuple[Tensor, ...]


def own_gradient(
    engine: Callable[..., Outputs],
    policy: Callable[..., Outputs],
    *inputs: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Outputs:
    """`engine(*inputs)`, whose gradients are those of `policy(*inputs)` in `dtype`; outputs have the same shapes."""
    return _OwnGradient.apply(engine, policy, dtype, *inputs)


def with_value(own: Tensor, value: Tensor) -> Tensor:
    """`value`, whose gradient goes to `own`."""
    return _WithValue.apply(own, value)


@contextmanager
def holding(module: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Inside the block the module has these tensors in the place of its parameters."""
    held = dict(module._parameters)
    try:
        module._parameters.update(parameters)
        yield
    finally:
        module._parameters.clear()
        module._parameters.update(held)


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
        made = (next(found) if need else None for need in needed)
        given = zip(made, saved, strict=True)
        return None, None, None, *(None if gradient is None else gradient.to(of.dtype) for gradient, of in given)


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, value):
        return value.to(own.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
