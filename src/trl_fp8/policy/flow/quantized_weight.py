"""Q(W), and the state of W that it was made from.

A trainer has it from the latest sync, or makes it when a forward comes first. It is kept until the weight changes, as
far as that can be seen: its identity, version counter and storage. Fused optimizers and in-place writes to `.data`
(PEFT's merge and unmerge) move none of them, so whoever changes weights drops what is kept. Each sync quantizes anew,
so that the engine has the current policy in any case, and the trainer from then on.
"""

import weakref
from dataclasses import dataclass

import torch
from torchao.quantization import Float8Tensor

from .flow import FP8Flow


@dataclass(frozen=True)
class QuantizedWeight:
    """Q(W), and the state of W that it was made from."""

    codes: Float8Tensor
    weight: weakref.ref
    state: tuple

    @classmethod
    def of(cls, weight: torch.Tensor, codes: Float8Tensor) -> "QuantizedWeight":
        return cls(codes, weakref.ref(weight), _state(weight))

    def is_current(self, weight: torch.Tensor) -> bool:
        return self.weight() is weight and self.state == _state(weight)


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
        kept = self._quantized.get(name)
        return kept.codes if kept is not None and kept.is_current(getattr(self, name)) else None

    def keep(self, codes: Float8Tensor, name: str = "weight") -> None:
        """Compute with `codes`, Q(W) of the weight as it is now, until the weight changes."""
        self._quantized[name] = QuantizedWeight.of(getattr(self, name), codes)

    def __getstate__(self) -> dict:
        """What copies and pickles hold: everything but what belongs to this module's weights."""
        return self.__dict__ | {"_quantized": {}}


def _state(weight: torch.Tensor) -> tuple:
    return weight._version, weight.data_ptr(), weight.dtype, weight.device
