"""Ctrl-C: one line and exit status 130, in place of the tracebacks of whatever was running."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


STATUS = 128 + signal.SIGINT  # as a shell has it for a process that SIGINT ended
# A terminal sends SIGINT to all processes in front, and a launcher passes its own on: a second one within this time
# is the same Ctrl-C. A later one comes from a user who does not want to wait
SECONDS = 1.0
# Errors of a collective or an engine follow from Ctrl-C within this. A later one has another cause: some library
# swallowed the KeyboardInterrupt, and the program went on
FOLLOWS = 60.0


@contextmanager
def ended_by_ctrl_c(line: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C inside the block end the process with `STATUS`, after what `line` returns.

    The block is left by `KeyboardInterrupt`, so that what it has begun is cleaned up. Errors that follow from it, such
    as those of a collective whose other rank is gone, are not shown. Enter it before torch is imported.
    """
    first = 0.0

    def interrupt(*_: object) -> None:
        nonlocal first
        if not first:
            first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - first > SECONDS:
            os._exit(STATUS)

    # Registered first, it runs last: after it Python would take its modules apart, 7 s with torch and vLLM
    atexit.register(lambda: first and os._exit(STATUS))
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        first = 0.0  # it ended well: a library may have swallowed the KeyboardInterrupt
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and time.monotonic() - first > FOLLOWS:
            first = 0.0
        if not first:
            raise
        sys.stdout.flush()
        text = line()
        sys.stderr.write(f"\n{text}\n" if text else "")
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # for what libraries print as they end
        sys.exit(STATUS)
    finally:
        if not first:
            signal.signal(signal.SIGINT, before)
