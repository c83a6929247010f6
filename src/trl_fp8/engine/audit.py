"""Proof, after a sync, that the engine holds what was sent: every tensor, byte for byte.

    sender:  weight_stream -> Ledger.record -> reload     a checksum of each tensor's part on this rank, on the way
    engine:  after the reload, the same checksum of the same piece of the parameter that it ended up in
    verdict: one transfer of both lists to the host; each tensor that differs, is missing or was never sent is named

A reload can go wrong without an error: vLLM finishes a layer that misses a shard with uninitialized memory, restores
the old tensors of a layer that got nothing, and accepts tensors in any order under any name that exists. All of these
leave a checksum that differs, or a name that is in only one of the two lists.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ..numerics.digest import digest
from .layout import Layout
from .weight_stream import Named


# Kernels that keep a block-FP8 weight and its scales as they were loaded. Others repack or requantize them.
AUDITABLE_KERNELS = (
    "ReferenceFp8BlockKernel",
    "CutlassFp8BlockScaledMMKernel",
    "TritonFp8BlockScaledMMKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel",
)


@dataclass
class Ledger:
    """What was sent in one sync: a checksum per tensor, on the device. `record` a stream, then `audit`."""

    layout: Layout
    digests: dict[str, torch.Tensor] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unaudited: set[str] = field(default_factory=set)

    def record(self, stream: Iterable[Named]) -> Iterator[Named]:
        """Pass `stream` through unchanged and note the checksum of this rank's part of each tensor."""
        for name, tensor in stream:
            if (piece := self.layout.pieces.get(name)) is not None:
                self.digests[name] = digest(piece.of_sent(tensor))
            elif (key := self.layout.unreadable_name(name)) is not None:
                self.unaudited.add(key)
            elif not name.endswith(("q_scale", "k_scale", "v_scale")):  # those are read back by kv_cache
                self.unknown.append(name)
            yield name, tensor

    def audit(self) -> int:
        """Compare with the engine; returns the number of tensors proven. Waits for the device once.

        Raises:
            RuntimeError: Something differs; the message names every tensor (the first dozen of each kind).
        """
        missing = [name for name in self.layout.pieces if name not in self.digests]
        missing += [name for name in self.layout.unreadable if name not in self.unaudited]
        held = {name: digest(self.layout.pieces[name].of_engine()) for name in self.digests}
        differing = []
        if held:
            pairs = torch.stack([torch.stack(list(held.values())), torch.stack(list(self.digests.values()))])
            engine, sent = pairs.tolist()
            differing = [name for name, a, b in zip(held, engine, sent, strict=True) if a != b]
        problems = {
            "hold other bytes than were sent": differing,
            "are in the engine but were never sent": missing,
            "were sent but are not in the engine": self.unknown,
        }
        found = [
            f"{len(names)} tensors {what}: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
            for what, names in problems.items()
            if names
        ]
        if found:
            raise RuntimeError(
                "weight sync failed its audit: "
                + "; ".join(found)
                + ". The engine must not generate; nothing was trained on it. This is a defect of the sync (vLLM 0.31 "
                "is what it was tested with), not of your data."
            )
        return len(held)


def require_auditable(kernels: dict[str, int]) -> None:
    """Raise `RuntimeError` if an FP8 kernel of the engine changes weights after loading, so that no audit is possible.

    Args:
        kernels: Class name -> number of layers, from `layout.fp8_kernels`.
    """
    refused = {name: count for name, count in kernels.items() if name not in AUDITABLE_KERNELS}
    if refused:
        raise RuntimeError(
            f"vLLM chose FP8 linear kernels that repack or requantize weights: {refused}. What they hold cannot be "
            f"compared with what was sent. Auditable kernels: {list(AUDITABLE_KERNELS)}; choose one with "
            "vllm_engine_kwargs={'linear_backend': 'cutlass'} (Hopper) or {'linear_backend': 'triton'}."
        )
