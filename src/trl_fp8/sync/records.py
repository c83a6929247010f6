"""Types of a delivery: the source of tensors, the value sent beside them, the report; and a generation's purpose."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .writer import SentTensor


class CarriedValue(Protocol):
    """A value that a delivery writes beside the weights (scales of an FP8 KV cache). It is the same on every rank."""

    name: str  # its name in an audit and a `SyncReport`
    value: object  # the value to send; after a delivery the engine holds it. None: nothing to send yet

    def prepare(self) -> None:
        """Compute `value` anew from the policy's current weights. May be a collective.

        Raises `ValueError` if it cannot be computed, and leaves `value` at what the engine holds.
        """

    def write(self) -> None:
        """Copy `value` into the engine. Does not synchronize with the device."""

    def verify(self) -> None:
        """Raise `RuntimeError` unless the engine holds `value`, in every copy that it keeps."""

    def digest(self) -> torch.Tensor:
        """Return a checksum of `value`, an int64 scalar, which the audit compares over ranks."""


# Opens the source of the tensors that a delivery sends, in a `with` block. Calling it and iterating are collectives
Tensors = Callable[[], AbstractContextManager[Iterator[SentTensor]]]


class Occasion(NamedTuple):
    """Purpose of a generation. The occasion and the number of the engine's call seed the sampling, so a resumed run
    samples what an uninterrupted run does.
    """

    run_seed: int
    step: int
    training: int  # 1: training; 0: evaluation


@dataclass(frozen=True)
class SyncReport:
    """Report of one finished sync."""

    seconds: float  # wall time of the whole sync, including the seconds of the next two fields
    quantize_seconds: float  # quantizing and writing, as the host sees it; on a GPU the device may still be at work
    prepare_seconds: float  # computing the carried value
    audited_tensors: int  # number of tensors that were read back and compared
    bytes_sent: int  # size of the written tensors in the engine on this rank, scales included
    fp8_weights: int  # number of weights in FP8
    # sqrt(sum of squared quantization errors / sum of squared weights), over a sample of this rank's rows
    weight_relative_error: float
    dead_blocks: dict[str, int]  # FP8 weight -> number of its blocks that are as good as zero
    carried: Mapping[str, object]  # name -> value of the `CarriedValue` that was sent; empty without one
