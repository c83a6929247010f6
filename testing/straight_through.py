"""Gradients of the straight-through definition, from transformers' own modules and autograd alone.

A policy whose forward is an engine's was run, and what went into and came out of each of its parts was recorded. Here
the same architecture computes again in float64. Each of its parts gets the recorded values and hands on the recorded
values, by x + (value - x).detach(); so every derivative is that of the plain computation, taken where the policy was,
and autograd chains them. Nothing here imports the package: an oracle that shares code shares its mistakes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel


TURN = "apply_rotary_pos_emb"
Visit = Callable[[str, Tensor], Tensor | None]  # a part's name and its value -> what takes its place; None: itself


@contextmanager
def visiting(model: PreTrainedModel, visit: Visit) -> Iterator[None]:
    """Call `visit` with all that goes into or comes out of linears and norms, and with q and k after their turn."""
    family, handles, turns = sys.modules[type(model).__module__], [], iter(range(10**6))
    original = getattr(family, TURN)

    def seen(name: str, value: Tensor) -> Tensor:
        other = visit(name, value)
        return value if other is None else other

    def turn(*args, **kwargs) -> tuple[Tensor, Tensor]:
        layer, turned = next(turns), original(*args, **kwargs)
        return tuple(seen(f"{layer}.{which}", each) for which, each in zip("qk", turned, strict=True))

    for name, module in model.get_decoder().named_modules():
        if next(module.parameters(recurse=False), None) is None or isinstance(module, nn.Embedding):
            continue
        into, out = f"{name} <-", f"{name} ->"
        handles.append(module.register_forward_pre_hook(lambda _, args, at=into: (seen(at, args[0]), *args[1:])))
        handles.append(module.register_forward_hook(lambda _, args, output, at=out: seen(at, output)))
    setattr(family, TURN, turn)
    try:
        yield
    finally:
        setattr(family, TURN, original)
        for handle in handles:
            handle.remove()


class Recorder:
    """`Visit` that keeps every value, by name."""

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
    """Return gradients per parameter, in float64.

    Args:
        model: In float64, with eager attention.
        values: What the policy's parts got and handed on, as `Recorder` keeps them, of a batch padded on the left.
        sequences: The token ids of each row, without padding.
        loss: Of a row and its logits `[T, V]`.
        rounding: Applied to each gradient that passes from part to part.
    """
    model.zero_grad()
    for row, tokens in enumerate(sequences):

        def played(name: str, own: Tensor, row: int = row) -> Tensor:
            value = values[name][row : row + 1]
            for dim, size in enumerate(own.shape):  # tokens are the only dim that padding made longer
                value = value.narrow(dim, value.shape[dim] - size, size)
            value = valued(own, value)
            if rounding is not None and value.requires_grad:
                value.register_hook(rounding)
            return value

        with visiting(model, played):
            logits = model(input_ids=tokens[None], use_cache=False).logits
        if rounding is not None:
            logits.register_hook(rounding)
        loss(row, logits[0]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
