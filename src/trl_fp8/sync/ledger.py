"""Proof, after a sync, that the engine holds what was sent: every tensor, byte for byte.

    sender:  weight_stream -> Ledger.record -> engine     a checksum of each tensor's part on this rank, on the way
    engine:  the same checksum of the same piece of the parameter that it ended up in
    verdict: one transfer of both lists to the host; each tensor that differs, is missing or was never sent is named
    ranks:   so is each that differs over ranks, which would train on rollouts of different policies
    seal:    the same checksums of the engine, taken again before anything is sampled

Loading can go wrong without an error: vLLM finishes a layer that misses a shard with uninitialized memory, restores
the old tensors of a layer that got nothing, and accepts tensors in any order under any name that exists. All of these
leave a checksum that differs, or a name in only one of the lists.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from trl_fp8.quantization.digest import digest
from trl_fp8.quantization.kv_scales import KVScales
from trl_fp8.recipe.names import listed

from .pieces import Layout
from .weight_stream import Named


@dataclass(frozen=True)
class Replicas:
    """Ranks with the same place in their engine's tensor parallel group: they hold the same part of the policy."""

    rank: int  # of this process
    tensor_parallel_size: int  # number of consecutive ranks that share one engine
    reduce_max: Callable[[torch.Tensor], None]  # replaces a tensor by its maximum over all ranks

    def extremes(self, values: torch.Tensor) -> torch.Tensor:
        """Largest and smallest of each of the int64 `values` `[n]` over the replicas: `[2, n]`. A collective."""
        slots = values.new_full((2, self.tensor_parallel_size, len(values)), torch.iinfo(torch.int64).min)
        slot = self.rank % self.tensor_parallel_size
        slots[0, slot], slots[1, slot] = values, ~values  # ~x falls as x rises, and has no overflow
        self.reduce_max(slots)
        return torch.stack([slots[0, slot], ~slots[1, slot]])


def all_reduce_max(tensor: torch.Tensor) -> None:
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)


@dataclass
class Ledger:
    """What was sent in one sync: a checksum per tensor, on the device. `record` a stream, then `audit`."""

    layout: Layout  # of the engine
    replicas: Replicas | None = None  # the ranks to compare with
    digests: dict[str, torch.Tensor] = field(default_factory=dict)  # of this rank's part, by checkpoint name
    unread: dict[str, torch.Tensor | int] = field(default_factory=dict)  # of what was sent, by `layout.unreadable`
    unknown: list[str] = field(default_factory=list)  # names that the engine does not have
    seal: "Seal | None" = None  # of the engine as the audit found it

    def record(self, stream: Iterable[Named]) -> Iterator[Named]:
        """Pass `stream` through and note the checksum of this rank's part of each tensor, as it will be held."""
        for name, tensor in stream:
            if (piece := self.layout.pieces.get(name)) is not None:
                self.digests[name] = digest(piece.of_sent(tensor), piece.dtype)
            elif (key := self.layout.unreadable_name(name)) is not None:
                before = self.unread.get(key, 0)
                self.unread[key] = 31 * before + digest(tensor) if self.replicas else before  # modulo 2**64
            elif not name.endswith(("q_scale", "k_scale", "v_scale")):  # an engine reads those back itself
                self.unknown.append(name)
            yield name, tensor

    def audit(self, kv_scales: KVScales | None = None) -> int:
        """Number of tensors proven; `RuntimeError` names those that differ. Waits for the device once.

        With `replicas` a collective, which also compares the `kv_scales` that were sent.
        """
        missing = [name for name in self.layout.pieces if name not in self.digests]
        missing += [name for name in self.layout.unreadable if name not in self.unread]
        engine_differs, ranks_differ = self._compare(kv_scales)
        problems = {
            "hold other bytes than were sent": engine_differs,
            "are in the engine but were never sent": missing,
            "were sent but are not in the engine": self.unknown,
            "are not the same on every rank": ranks_differ,
        }
        found = [f"{len(names)} tensors {what}: {listed(names, 12)}" for what, names in problems.items() if names]
        if found:
            cause = (
                "This is a defect of the sync (vLLM 0.31 is what it was tested with), not of your data."
                if engine_differs or missing or self.unknown
                else "The ranks hold different policies: look for what changes weights on some of them only."
            )
            raise RuntimeError(
                f"weight sync failed its audit: {'; '.join(found)}. The engine must not generate; nothing was trained "
                f"on it. {cause}"
            )
        return len(self.digests)

    def _compare(self, kv_scales: KVScales | None) -> tuple[list[str], list[str]]:
        """Names whose bytes differ in the engine, and over ranks. Every rank lists all names, sent or not."""
        names = list(self.layout.pieces)
        if not names:
            self.seal = Seal(self.layout, ())
            return [], []
        held, unread = _held(self.layout), {}
        nothing = torch.zeros_like(held[0])
        if self.replicas:
            unread = {name: self.unread.get(name, nothing) for name in self.layout.unreadable}
            unread["KV cache scales"] = nothing if kv_scales is None else digest(kv_scales.values).to(nothing.device)
        labels = [*(f"{name} (in the engine)" for name in names), *names, *unread]
        values = torch.stack([*held, *(self.digests.get(name, nothing) for name in names), *unread.values()])
        extremes = self.replicas.extremes(values) if self.replicas else (values, values)
        own, largest, smallest = torch.stack([values, *extremes]).tolist()
        ranks_differ = [name for name, a, b in zip(labels, largest, smallest, strict=True) if a != b]
        held_values, sent_values = own[: len(names)], own[len(names) : 2 * len(names)]
        self.seal = Seal(self.layout, tuple(held_values))
        pairs = zip(names, held_values, sent_values, strict=True)
        return [name for name, a, b in pairs if a != b and name in self.digests], ranks_differ


@dataclass(frozen=True)
class Seal:
    """What an engine held when it was audited: checksums of `layout.pieces`, in order."""

    layout: Layout
    values: tuple[int, ...]

    def require_unbroken(self) -> None:
        """Raise `RuntimeError` naming what changed since. Reads every weight and waits for the device once."""
        now = _held(self.layout).tolist() if self.values else []
        changed = [name for name, a, b in zip(self.layout.pieces, self.values, now, strict=True) if a != b]
        if changed:
            raise RuntimeError(
                f"{len(changed)} tensors of the engine have changed since the last sync: {listed(changed, 12)}. "
                "Something other than the sync wrote to them (a callback, a hook, memory that was handed out twice), "
                "so that the engine would sample from another policy. Nothing was sampled; the next sync repairs it."
            )


def _held(layout: Layout) -> torch.Tensor:
    """Checksum `[n]`, on the device, of each piece as the engine holds it."""
    return torch.stack([digest(piece.of_engine()) for piece in layout.pieces.values()])
