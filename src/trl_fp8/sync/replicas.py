"""The ranks that have to hold the same bytes, and whether they do.

If one rank's engine got other weights (a gather gone wrong, a policy that drifted apart), each sync would pass its own
audit, and the ranks would train on rollouts of different policies. So the audit's checksums are also compared over
ranks: one small all-reduce, part of the audit's transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


_ABSENT = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Replicas:
    """Ranks with the same place in their engine's tensor parallel group: they hold the same part of the policy."""

    rank: int  # of this process
    tensor_parallel_size: int  # number of consecutive ranks that share one engine
    reduce_max: Callable[[torch.Tensor], None]  # replaces a tensor by its maximum over all ranks

    def extremes(self, values: torch.Tensor) -> torch.Tensor:
        """Largest and smallest of each of the int64 `values` `[n]` over the replicas: `[2, n]`. A collective."""
        slots = values.new_full((2, self.tensor_parallel_size, len(values)), _ABSENT)
        slot = self.rank % self.tensor_parallel_size
        slots[0, slot], slots[1, slot] = values, ~values  # ~x falls as x rises, and has no overflow
        self.reduce_max(slots)
        return torch.stack([slots[0, slot], ~slots[1, slot]])


def all_reduce_max(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its maximum over all ranks."""
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
