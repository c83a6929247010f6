"""Proof, after a sync, that the engine holds what was sent: every tensor, byte for byte.

    sent:    a checksum of this rank's part of each tensor, made while the writer computed the part (writer.py)
    held:    the same checksum of the engine's parameter, read back
    verdict: sent and held are compared on the host. An error names tensors that differ, are missing or were never
             sent, or that differ between ranks, which would then train on rollouts of different policies
    seal:    the engine's checksums are kept, and compared with new ones before anything is sampled

A wrong `Layout` would pass, because writing and reading share it. So policy_checks.py compares its names and shapes
with the policy at the start, and tests compare it with vLLM's own loader.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from trl_fp8.recipe.messages import listed

from .pieces import Layout
from .writer import Writer


ReduceMax = Callable[[torch.Tensor], None]  # replaces a tensor by its maximum over some ranks


@dataclass(frozen=True)
class Replicas:
    """The ranks of a job. Engines of ranks with the same tensor parallel rank hold the same part of the policy."""

    rank: int  # rank of this process
    tensor_parallel_size: int  # number of consecutive ranks that share one engine
    reduce_max: ReduceMax  # over all ranks of the job
    reduce_max_of_engine: ReduceMax | None = None  # over the ranks of this rank's engine; None: it has only this rank

    def extremes(self, values: torch.Tensor) -> torch.Tensor:
        """Return the maxima and the minima `[2, n]` of the int64 `values` `[n]` over the ranks that hold the same part
        of the policy. Collective of all ranks.
        """
        # One reduction serves all parts. Each tensor parallel rank has a slot, in which other ranks leave the smallest
        # int64
        slots = values.new_full((2, self.tensor_parallel_size, len(values)), torch.iinfo(torch.int64).min)
        slot = self.rank % self.tensor_parallel_size
        slots[0, slot] = values
        slots[1, slot] = ~values  # falls as the value rises, so its maximum is the minimum; -x could overflow
        self.reduce_max(slots)
        return torch.stack([slots[0, slot], ~slots[1, slot]])


def all_reduce_max(tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None) -> None:
    """Replace a tensor by its element-wise maximum over the ranks of `group` (None: all ranks). Collective."""
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)


def audit(
    layout: Layout,
    written: Writer,
    carried: Mapping[str, torch.Tensor],
    replicas: Replicas | None = None,
    *,
    carried_arrived: bool = True,
) -> list[int]:
    """Compare what was written with what the engine holds. Return the seal: checksums of `layout.names`.

    Waits for the device once. With `replicas` it is a collective that also compares the checksums over ranks.

    Args:
        carried: Name of the `CarriedValue` (records.py) -> its checksum; empty without one. All ranks pass the same
            names. Compared over ranks only, because `CarriedValue.verify` has read the engine.
        carried_arrived: Whether `CarriedValue.verify` found the value in the engine on this rank.

    Raises:
        RuntimeError: Tensors differ; the message names them.
    """
    # 1. Checksums of each tensor as held and as sent, and of each carried value, int64 on the device
    names = layout.names
    sent = written.sums
    in_engine = layout.sums()
    zero = torch.zeros((), dtype=torch.int64, device=in_engine.device)  # stands for tensors that were not sent
    labels = [f"{name} (in the engine)" for name in names]
    values = list(in_engine.unbind())
    labels += names
    values += [sent.get(name, zero) for name in names]
    if replicas:
        labels += carried.keys()
        values += [each.to(in_engine.device) for each in carried.values()]
        labels += [f"{name} (in the engine)" for name in carried]
        values += [zero + int(carried_arrived)] * len(carried)  # no checksums: whether the values arrived
    # 2. The extremes of each checksum over the ranks that have to agree, and one transfer of all numbers to the host
    own = torch.stack(values) if values else in_engine  # this rank's checksums
    largest, smallest = own, own
    if replicas:
        largest, smallest = replicas.extremes(own)
    own_sums, largest_sums, smallest_sums = torch.stack([own, largest, smallest]).tolist()
    # 3. The verdict, by name
    engine_sums = own_sums[: len(names)]
    sent_sums = own_sums[len(names) : 2 * len(names)]
    different = []
    for name, engine_sum, sent_sum in zip(names, engine_sums, sent_sums, strict=True):
        if name in sent and engine_sum != sent_sum:
            different.append(name)
    problems = {
        "hold other bytes than were sent": different,
        "are in the engine but were never sent": [name for name in names if name not in sent],
        "were sent but are not in the engine": written.unknown,
    }
    cause = "The ranks hold different policies: look for what changes weights on some ranks only."
    if any(problems.values()):  # otherwise each engine holds what its rank sent, so the ranks sent different tensors
        cause = "This is a defect of the sync, not of your data."
    extremes = zip(labels, largest_sums, smallest_sums, strict=True)
    problems["are not the same on every rank"] = [label for label, most, least in extremes if most != least]
    lines = [f"{len(which)} tensors {what}: {listed(which, 12)}" for what, which in problems.items() if which]
    if lines:
        raise RuntimeError(
            f"weight sync failed its audit: {'; '.join(lines)}.{layout.blame} The engine must not generate; nothing "
            f"was trained on it. {cause}"
        )
    return engine_sums
