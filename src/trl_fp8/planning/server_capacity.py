"""Capacity of a trainer whose engine is a server on GPUs of its own: what moves there, and what stays."""

from dataclasses import dataclass, replace

from .capacity import Capacity, Planner
from .trainer_memory import Setup, TrainerMemory


SHARE = 0.9  # of a server's GPU for vLLM, where nothing else is


@dataclass(frozen=True)
class ServerCapacity:
    """Memory of both."""

    server: Capacity  # of each of the server's GPUs, without a trainer
    trainer: Capacity  # of each of the trainer's GPUs, with an engine that takes nothing

    @property
    def staged_bytes(self) -> int:
        """Return the size of the FP8 copy of the policy on each GPU of the trainer, and once in host memory."""
        return self.server.plan.bytes_after

    @property
    def trainer_bytes(self) -> float:
        """Return what the trainer takes of each GPU."""
        return self.trainer.total_bytes + self.staged_bytes

    @property
    def trainer_fits(self) -> bool:
        return self.trainer_bytes <= self.trainer.limit_bytes


def server_capacity(planner: Planner, setup: Setup) -> ServerCapacity:
    """Return the capacity of a server with as few GPUs as hold the model, and of its trainer.

    A tensor parallel size and a share of a GPU in `setup` are the server's.
    """
    trainer = planner.capacity(replace(setup, tensor_parallel_size=1, utilization=0.0))
    nothing = TrainerMemory(*[0.0] * 8)
    share = setup.utilization if setup.utilization is not None else SHARE
    sizes = [setup.tensor_parallel_size]
    if setup.tensor_parallel_size is None:
        sizes = planner.sizes_on(planner.sizes[-1])
    servers = [Capacity(planner.plan_at(size), nothing, replace(setup, gpus=size), share) for size in sizes]
    fitting = [server for server in servers if server.why_no_cache is None]
    return ServerCapacity((fitting or servers)[0], trainer)
