"""Modules of a policy that stay the objects they are and compute something else: only their class is exchanged.

So parameters, names, state dict, hooks, PEFT wrappers and sharding stay as they are.
"""

from abc import abstractmethod
from functools import cache

from torch import nn
from torchao.quantization import Float8Tensor


class HoldsCodes:
    """Mixed into the class of a linear layer, or of all experts of a layer, that holds no weight: it computes with its
    FP8 codes, which an engine keeps.

    Experts have `dequantized`, too, with the arguments of their forward: what they compute with weights that are
    dequantized for the call, in the dtype of the hidden states.
    """

    codes: Float8Tensor | dict[str, Float8Tensor] | None  # of experts by parameter; None until the engine holds them


class Swapper:
    """Base of an object that swapped modules of a policy and is an attribute of each of them."""

    @abstractmethod
    def remove(self) -> None:
        """Turn the modules back into what they were."""


def release(model: nn.Module) -> None:
    """Turn back what a `Swapper` swapped: a trainer before this one left a policy that computes as its engine."""
    for module in list(model.modules()):
        for swapper in [value for value in vars(module).values() if isinstance(value, Swapper)]:
            swapper.remove()


def swap(module: nn.Module, mixin: type, **attributes: object) -> None:
    """Put `mixin` before the class of `module`, which it can call by `self.before`, and give it `attributes`."""
    module.__class__ = _swapped(mixin, type(module), tuple(attributes))
    module.__dict__.update(attributes)


def restore(module: nn.Module) -> None:
    """Make a swapped module what it was."""
    cls = type(module)
    for name in cls.attributes:
        module.__dict__.pop(name, None)
    module.__class__ = cls.before


@cache
def _swapped(mixin: type, cls: type[nn.Module], attributes: tuple[str, ...]) -> type:
    members = {"__module__": cls.__module__, "__reduce_ex__": _as_before, "before": cls, "attributes": attributes}
    return type(f"Followed{cls.__name__}", (mixin, cls), members)


def _as_before(module: nn.Module, protocol: int) -> tuple:
    """Copies and pickles of a module are what it was: its weights are an engine's or a sync's, theirs are not."""
    cls = type(module)
    return _empty, (cls.before,), {name: value for name, value in vars(module).items() if name not in cls.attributes}


def _empty(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)
