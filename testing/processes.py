"""Processes that a test starts: beside the engines of its own, and on ports that are free."""

import os
import socket


# An engine leaves its ranks in the environment, and listens on its port. Without bytecode every process would compile
# torch, vLLM and transformers from source: 40 s
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
NOT_INHERITED = (*RANKS, "MASTER_ADDR", "MASTER_PORT", "PYTHONDONTWRITEBYTECODE")


def alone(*dropped: str) -> dict[str, str]:
    """The environment of a process that is no rank of an engine here, without the variables `dropped`."""
    return {name: value for name, value in os.environ.items() if name not in (*NOT_INHERITED, *dropped)}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
