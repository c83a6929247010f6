"""`RolloutWorker`: TRL's worker of an asynchronous trainer, whose process ends with the trainer's.

TRL's process survives a trainer that is killed, and would go on sending requests to the server for ever.
"""

import multiprocessing
import os
import threading
import time

from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker


class RolloutLoop(AsyncRolloutWorker._loop_cls):
    """TRL's loop of rollouts, with a thread that ends its process once the trainer's process is gone."""

    def __init__(self, **kwargs):
        threading.Thread(target=_end_with_trainer, daemon=True, name="ends-with-trainer").start()
        super().__init__(**kwargs)


class RolloutWorker(AsyncRolloutWorker):
    """TRL's worker, whose process runs a `RolloutLoop`."""

    _loop_cls = RolloutLoop


def _end_with_trainer() -> None:
    """End this process once the trainer's process has ended."""
    # Not by `join` of the parent: it waits for a pipe, which another process that the trainer forked would keep open
    trainer = multiprocessing.parent_process().pid
    while os.getppid() == trainer:
        time.sleep(1)
    os._exit(1)
