"""Gradients of the straight-through definition, from transformers' own modules and autograd alone.

A policy ran with an engine's forward, and a `Recorder` kept the input and output of each of its parts. Here the same
architecture computes again in float64, and x + (recorded - x).detach() replaces the value x of each input and output.
So autograd chains derivatives of the plain computation, each taken at the values that the policy had. Nothing here
imports the package: an oracle that shares code shares its mistakes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

from torch import Tensor, nn
from transformers import PreTrainedModel


ROTARY = "apply_rotary_pos_emb"
Visit = Callable[[str, Tensor], Tensor | None]  # name and value of an input or output -> its replacement, if any


@contextmanager
def visiting(model: PreTrainedModel, visit: Visit) -> Iterator[None]:
    """Call `visit` with inputs and outputs of linears and norms, and with the rotated q and k."""
    module_of_family = sys.modules[type(model).__module__]
    original = getattr(module_of_family, ROTARY)
    layers = count()
    handles = []

    def visited(name: str, value: Tensor) -> Tensor:
        replacement = visit(name, value)
        return value if replacement is None else replacement

    def rotary(*args, **kwargs) -> tuple[Tensor, Tensor]:
        layer = next(layers)
        rotated = original(*args, **kwargs)
        return tuple(visited(f"{layer}.{which}", each) for which, each in zip("qk", rotated, strict=True))

    def before(name: str, module: nn.Module, args: tuple) -> tuple:
        return visited(name, args[0]), *args[1:]

    def after(name: str, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return visited(name, output)

    for name, module in model.get_decoder().named_modules():
        if next(module.parameters(recurse=False), None) is None or isinstance(module, nn.Embedding):
            continue
        handles.append(module.register_forward_pre_hook(partial(before, f"{name} <-")))
        handles.append(module.register_forward_hook(partial(after, f"{name} ->")))
    setattr(module_of_family, ROTARY, rotary)
    try:
        yield
    finally:
        setattr(module_of_family, ROTARY, original)
        for handle in handles:
            handle.remove()


class Recorder:
    """`Visit` that keeps a copy of every value, by name."""

    def __init__(self):
        self.values: dict[str, Tensor] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        assert name not in self.values, f"{name} computes twice"
        self.values[name] = value.detach().clone()


def valued(own: Tensor, value: Tensor) -> Tensor:
    """Return `value`, differentiated as `own`."""
    return own + (value.to(own.dtype) - own).detach()


def gradients(
    model: PreTrainedModel,
    values: dict[str, Tensor],
    sequences: list[Tensor],
    loss: Callable[[int, Tensor], Tensor],
    rounding: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the gradient of each parameter, in float64.

    Args:
        model: In float64, with eager attention.
        values: Inputs and outputs of the policy's parts, from a `Recorder`, for a batch padded on the left.
        sequences: Token ids of each row, without padding.
        loss: Number of a row and its logits `[T, V]` -> its loss.
        rounding: Applied to the gradient of each input and output.
    """
    model.zero_grad()
    for row, tokens in enumerate(sequences):

        def recorded(name: str, own: Tensor, row: int = row) -> Tensor:
            value = values[name][row : row + 1]
            for dim, size in enumerate(own.shape):  # padding made only the dim of tokens longer
                value = value.narrow(dim, value.shape[dim] - size, size)
            value = valued(own, value)
            if rounding is not None and value.requires_grad:
                value.register_hook(rounding)
            return value

        with visiting(model, recorded):
            logits = model(input_ids=tokens[None], use_cache=False).logits
        if rounding is not None:
            logits.register_hook(rounding)
        loss(row, logits[0]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
