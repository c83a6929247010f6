"""Processes that a test starts: beside the engines of its own, and on ports that are free."""

import gc
import os
import socket


# An engine leaves its ranks in the environment, and listens on its port. Without bytecode every process would compile
# torch, vLLM and transformers from source: 40 s
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
NOT_INHERITED = (*RANKS, "MASTER_ADDR", "MASTER_PORT", "PYTHONDONTWRITEBYTECODE")


def alone(*dropped: str) -> dict[str, str]:
    """Return the environment of a process that is no rank of an engine here, without the variables `dropped`.

    Its engine listens on a port of its own: TRL takes 29500 where it is free, and two
    that start at once both find it so.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in (*NOT_INHERITED, *dropped)}
    return inherited | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def settle_heap() -> None:
    """Take what is there, most of it imported code, out of the garbage collector's sight for the rest of this process.

    vLLM looks through the whole heap twice for each engine that starts and three times for each that ends: 2 of 3
    seconds of an engine's life.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # vLLM's own calls would undo it
