"""Q(W), and the state of W that it was made from.

It is kept until the weight changes, as far as that can be seen: its identity, version counter and storage. Fused
optimizers and in-place writes to `.data` (PEFT's merge and unmerge) move none of them, so whoever changes weights drops
what is kept.
"""

import weakref
from dataclasses import dataclass

import torch
from torchao.quantization import Float8Tensor

from .fp8_flow import FP8Flow


@dataclass(frozen=True)
class QuantizedWeight:
    """Q(W), and the state of W that it was made from."""

    codes: Float8Tensor
    weight: weakref.ref
    state: tuple

    @classmethod
    def of(cls, weight: torch.Tensor, flow: FP8Flow) -> "QuantizedWeight":
        return cls(flow.quantize_weight(weight), weakref.ref(weight), _state(weight))

    def is_current(self, weight: torch.Tensor) -> bool:
        return self.weight() is weight and self.state == _state(weight)


def _state(weight: torch.Tensor) -> tuple:
    return weight._version, weight.data_ptr(), weight.dtype, weight.device
