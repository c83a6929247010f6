"""`KeepsQuantizedWeight`: Q(W) of a linear layer whose engine holds only parts of it, kept until W changes.

A change shows in the weight's identity, version counter or storage. Fused optimizers and in-place writes to `.data`
(PEFT's merge and unmerge) move none of them, so whoever changes weights calls `OneForward.invalidate`.
"""

import weakref
from typing import NamedTuple

from torch import Tensor
from torchao.quantization import Float8Tensor

from trl_fp8.features.one_forward.backward import BackwardPrecision


class QuantizedWeight(NamedTuple):
    codes: Float8Tensor
    weight: weakref.ref[Tensor]  # what they were made from, and its state then
    state: tuple


class KeepsQuantizedWeight:
    """Mixed into the class of a linear layer."""

    weight: Tensor
    backward: BackwardPrecision
    kept: QuantizedWeight | None = None
    peers: tuple["KeepsQuantizedWeight", ...] = ()  # all layers, this one included, whose weights share a scale

    def quantized_weight(self) -> Float8Tensor:
        """Q(W), codes `[N, K]`: the kept one if it is current, else made now."""
        peers = self.peers or (self,)
        if (codes := self.cached_weight()) is None or any(peer.cached_weight() is None for peer in peers):
            made = self.backward.quantize_weights([peer.weight for peer in peers])
            codes = made[peers.index(self)]
            if self.backward.cache_weights:
                for peer, its_codes in zip(peers, made, strict=True):
                    peer.keep(its_codes)
        return codes

    def cached_weight(self) -> Float8Tensor | None:
        """Q(W) if it is kept and no change of the weight since is visible, else None."""
        kept, weight = self.kept, self.weight
        is_current = kept is not None and kept.weight() is weight and kept.state == _state(weight)
        return kept.codes if is_current else None

    def keep(self, codes: Float8Tensor) -> None:
        """Compute with `codes`, Q(W) as W is now, until W changes."""
        self.kept = QuantizedWeight(codes, weakref.ref(self.weight), _state(self.weight))


def _state(weight: Tensor) -> tuple:
    return weight._version, weight.data_ptr(), weight.dtype, weight.device
