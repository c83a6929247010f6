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


def _state(weight: torch.Tensor) -> tuple:
    return weight._version, weight.data_ptr(), weight.dtype, weight.device
