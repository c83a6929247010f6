"""Ctrl-C: one line and exit status 130, in place of the tracebacks of whatever was running."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


STATUS = 128 + signal.SIGINT  # the status that a shell reports for a process that SIGINT ended
# One Ctrl-C may send SIGINT twice: a terminal sends it to all processes in the foreground, and a launcher forwards its
# own. So a second SIGINT within this time is ignored. With a later one the user says not to wait any longer
SECONDS = 1.0
# Seconds after Ctrl-C in which an error, as of a collective or an engine, counts as its consequence. A later error has
# another cause: a library swallowed the KeyboardInterrupt, and the program went on
FOLLOWS = 60.0


@contextmanager
def ended_by_ctrl_c(line: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C inside the block end the process with `STATUS`. Before that write the text that `line` returns.

    `KeyboardInterrupt` leaves the block, so that it is cleaned up. Errors that follow from Ctrl-C, for example in a
    collective whose other rank has ended, are not shown. Enter the block before torch is imported.
    """
    first = 0.0  # monotonic time of the first Ctrl-C; 0: there was none

    def interrupt(*_: object) -> None:
        nonlocal first
        if not first:
            first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - first > SECONDS:
            os._exit(STATUS)

    def exit_at_once() -> None:
        if first:
            os._exit(STATUS)

    # Registered before the handlers of libraries, it runs after them. It skips Python's own finalization, which takes
    # 7 s
    atexit.register(exit_at_once)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        first = 0.0  # the block ended well: a library may have swallowed the KeyboardInterrupt
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and time.monotonic() - first > FOLLOWS:
            first = 0.0
        if not first:
            raise
        sys.stdout.flush()
        text = line()
        sys.stderr.write(f"\n{text}\n" if text else "")
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # hide what libraries print as they end
        sys.exit(STATUS)
    finally:
        if not first:
            signal.signal(signal.SIGINT, before)
