"""Processes that a test starts: beside the engines of its own, and on ports that are free."""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom


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


def fork(function: Callable[[], object], log: Path) -> int:
    """Call `function` in a fork of this process, which has imported everything. Return the id of the new process.

    It leads a process group, writes to `log`, and ends with the exit status of a program. No engine may run in this
    process. Process groups that one has left are destroyed, because a fork would wait for their threads.
    """
    import torch  # not above: the process that hands tests to workers needs none of it

    if torch.distributed.is_initialized():
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
    gc.collect()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1)
        signal.alarm(0)  # pytest's timeout
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        forget_compile_threads()
        environment = alone()
        os.environ.clear()
        os.environ.update(environment)
        function()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:  # nothing may return into the test, whose frames are above
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def forget_compile_threads() -> None:
    """Let Inductor start threads of its own in this fork.

    If the parent has compiled, Inductor's pool has threads that a fork lacks, and a compilation would wait for them
    forever. torch 2.13 replaces its pool of processes in a fork, but not the one of threads.
    """
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:
        compiler.AsyncCompile.pool.cache_clear()


def free_port() -> int:
    """Return a free port. Other processes get none of these numbers from the system, whose own begin at 32768."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)  # no seed, which tests of other processes may have set, too
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def settle_heap() -> None:
    """Take what is there, most of it imported code, out of the garbage collector's sight for the rest of this process.

    vLLM looks through the whole heap twice for each engine that starts and three times for each that ends: 2 of 3
    seconds of an engine's life.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # vLLM's own calls would undo it
