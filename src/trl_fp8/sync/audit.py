"""Proof, after a sync, that the engine holds what was sent: every tensor, byte for byte.

    sent:    a checksum of each tensor's part on this rank, made while it was computed (writer.py)
    held:    the same checksum of the engine's parameter, read back
    verdict: one transfer of both to the host. It names tensors that differ, are missing, were never sent, or are not
             the same on all ranks: then ranks would train on rollouts of different policies
    seal:    the same checksums of the engine, taken again before anything is sampled

A wrong `Layout` would pass, since writing and reading share it. So its names and shapes are checked against the policy
at the start, and tests compare it with vLLM's own loader.
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
    """Ranks with the same place in their engine's tensor parallel group: they hold the same part of the policy."""

    rank: int  # of this process
    tensor_parallel_size: int  # number of consecutive ranks that share one engine
    reduce_max: ReduceMax  # over all ranks
    reduce_max_of_engine: ReduceMax | None = None  # over the ranks of this rank's engine; None: it has one alone

    def extremes(self, values: torch.Tensor) -> torch.Tensor:
        """Return largest and smallest of each of the int64 `values` `[n]` over the replicas, `[2, n]`. Collective."""
        # One reduction serves all groups: each place in an engine has a slot, where other places leave the minimum
        slots = values.new_full((2, self.tensor_parallel_size, len(values)), torch.iinfo(torch.int64).min)
        slot = self.rank % self.tensor_parallel_size
        slots[0, slot], slots[1, slot] = values, ~values  # ~x falls as x rises, and has no overflow
        self.reduce_max(slots)
        return torch.stack([slots[0, slot], ~slots[1, slot]])


def all_reduce_max(tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None) -> None:
    """Replace a tensor by its maximum over a group of ranks; None: all of them."""
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)


def audit(
    layout: Layout,
    written: Writer,
    carried: Mapping[str, torch.Tensor],
    replicas: Replicas | None = None,
    *,
    carried_arrived: bool = True,
) -> list[int]:
    """Compare what was written with what is held; `RuntimeError` names what differs. Returns the seal: checksums of
    `layout.names`. Waits for the device once.

    With `replicas` it is a collective. It then also compares over ranks the checksums of what is `carried` beside the
    weights, and whether all of that has arrived. `carried` has the same names in the same order on all ranks.
    """
    # 1. For each tensor the checksums held and sent, int64 on the device; likewise for what is carried
    names, sent = layout.names, written.sums
    in_engine = layout.sums()
    nothing = torch.zeros((), dtype=torch.int64, device=in_engine.device)
    values = [*in_engine.unbind(), *(sent.get(name, nothing) for name in names)]
    labels = [*(f"{name} (in the engine)" for name in names), *names]
    if replicas:
        labels += [*carried, *(f"{name} (in the engine)" for name in carried)]
        values += [each.to(in_engine.device) for each in carried.values()]
        values += [nothing + int(carried_arrived)] * len(carried)
    # 2. Their extremes over the ranks that have to agree, and one transfer of all to the host
    own = torch.stack(values) if values else in_engine
    largest, smallest = replicas.extremes(own) if replicas else (own, own)
    own, largest, smallest = torch.stack([own, largest, smallest]).tolist()
    # 3. The verdict, by name
    held_values, sent_values = own[: len(names)], own[len(names) : 2 * len(names)]
    differ = zip(names, held_values, sent_values, strict=True)
    problems = {
        "hold other bytes than were sent": [name for name, a, b in differ if a != b and name in sent],
        "are in the engine but were never sent": [name for name in names if name not in sent],
        "were sent but are not in the engine": written.unknown,
    }
    cause = "The ranks hold different policies: look for what changes weights on some of them only."
    if any(problems.values()):
        cause = "This is a defect of the sync, not of your data."
    differ = [name for name, a, b in zip(labels, largest, smallest, strict=True) if a != b]
    problems["are not the same on every rank"] = differ
    found = [f"{len(which)} tensors {what}: {listed(which, 12)}" for what, which in problems.items() if which]
    if found:
        raise RuntimeError(
            f"weight sync failed its audit: {'; '.join(found)}. The engine must not generate; nothing was trained on "
            f"it. {cause}"
        )
    return held_values
