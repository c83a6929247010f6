"""Modules of a policy that stay the objects they are and compute something else: only their class is exchanged.

So parameters, names, state dict, hooks, PEFT wrappers and sharding stay as they are. Those whose weights are FP8 keep
Q(W), from the latest sync or a forward that came first, until W changes, as far as its identity, version counter and
storage show that. Fused optimizers and in-place writes to `.data` (PEFT's merge and unmerge) move none of them, so
whoever changes weights calls `invalidate`. Each sync quantizes anew, so that the engine has the current policy anyway.
"""

import weakref
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn
from torchao.quantization import Float8Tensor

from .flow import FP8Flow


class SwappedModules:
    """What was installed together, and is removed together: name -> module, in model order."""

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules

    def invalidate(self) -> None:
        """Drop every kept weight. To be called after each optimizer step, checkpoint load, merge and unmerge."""
        for module in self.modules.values():
            if isinstance(module, KeepsQuantizedWeights):
                module._quantized.clear()

    def remove(self) -> None:
        """Turn the modules back into what they were."""
        for module in self.modules.values():
            for name in type(module).attributes:
                module.__dict__.pop(name, None)
            module.__class__ = type(module).before
        self.modules.clear()


@cache
def swapped_class(mixin: type, cls: type[nn.Module], prefix: str, attributes: tuple[str, ...] = ()) -> type:
    """`cls` with `mixin` before it, and what `SwappedModules.remove` needs: the class, and attributes to delete."""
    members = {"__module__": cls.__module__, "__reduce_ex__": _as_before, "before": cls, "attributes": attributes}
    return type(f"{prefix}{cls.__name__}", (mixin, cls), members)


def _as_before(module: nn.Module, protocol: int) -> tuple:
    """Copies and pickles of a module are what it was: its weights are an engine's or a sync's, theirs are not."""
    cls = type(module)
    return _empty, (cls.before,), {name: value for name, value in vars(module).items() if name not in cls.attributes}


def _empty(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


class QuantizedWeight(NamedTuple):
    codes: Float8Tensor
    weight: weakref.ref[Tensor]  # what they were made from, and its state then
    state: tuple


class KeepsQuantizedWeights:
    """Mixed into the class of a module whose weights, under some names, are FP8."""

    fp8_flow: FP8Flow
    _quantized: dict[str, QuantizedWeight]
    _peers: tuple["KeepsQuantizedWeights", ...] = ()  # all modules, this one included, whose weights share a scale

    def quantized_weight(self, name: str = "weight") -> Float8Tensor:
        """Q(W), codes `[..., N, K]`: the kept one if it is current, else made now."""
        peers = self._peers or (self,)
        if (codes := self.cached_weight(name)) is None or any(peer.cached_weight(name) is None for peer in peers):
            made = self.fp8_flow.quantize_weights([getattr(peer, name) for peer in peers])
            codes = made[peers.index(self)]
            if self.fp8_flow.cache_weights:
                for peer, its_codes in zip(peers, made, strict=True):
                    peer.keep(its_codes, name)
        return codes

    def cached_weight(self, name: str = "weight") -> Float8Tensor | None:
        """Q(W) if it is kept and no change of the weight since is visible, else None."""
        kept, weight = self._quantized.get(name), getattr(self, name)
        is_current = kept is not None and kept.weight() is weight and kept.state == _state(weight)
        return kept.codes if is_current else None

    def keep(self, codes: Float8Tensor, name: str = "weight") -> None:
        """Compute with `codes`, Q(W) of the weight as it is now, until the weight changes."""
        weight = getattr(self, name)
        self._quantized[name] = QuantizedWeight(codes, weakref.ref(weight), _state(weight))


def _state(weight: Tensor) -> tuple:
    return weight._version, weight.data_ptr(), weight.dtype, weight.device
