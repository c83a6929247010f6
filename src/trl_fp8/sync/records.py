"""Records of a delivery: the tensors that it gets, the value that goes with them, and the report that it returns."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from .writer import SentTensor


class CarriedValue(Protocol):
    """A value that a delivery writes beside the weights (scales of an FP8 KV cache). The same on every rank."""

    name: str  # as an audit and a `SyncReport` call it
    value: object  # what was sent last; None: there is nothing to send yet

    def prepare(self) -> None:
        """Make `value` that of the policy as it is now; may be a collective. `ValueError` if that cannot be computed:
        then `value` stays what it was, which the engine still holds.
        """

    def write(self) -> None:
        """Copy `value` into the engine. Does not synchronize with the device."""

    def verify(self) -> None:
        """Raise `RuntimeError` unless the engine holds `value`, in every copy that it keeps."""

    def digest(self) -> torch.Tensor:
        """Checksum of `value`, an int64 scalar, which is compared over ranks."""


Tensors = Callable[[], AbstractContextManager[Iterator[SentTensor]]]  # opens parameters of a policy, a collective


@dataclass(frozen=True)
class SyncReport:
    """One finished sync."""

    seconds: float  # wall time; of it:
    quantize_seconds: float  # quantizing and writing, as the host sees it; on a GPU the device may go on
    prepare_seconds: float  # computing what is carried
    audited_tensors: int  # read back and compared
    bytes_sent: int  # of what was written, as the engine holds it on this rank, scales included
    fp8_weights: int
    weight_relative_error: float  # root of the squared quantization error over the squared weight, of sampled own rows
    dead_blocks: dict[str, int]  # FP8 weight -> number of its blocks that are as good as zero
    carried: Mapping[str, object]  # name -> value of what was sent beside the weights
