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
# own. So a second SIGINT within this time is ignored. A later one is a second Ctrl-C and ends the process at once
SECONDS = 1.0
# For this many seconds after Ctrl-C an error counts as its consequence: a collective or an engine broke off. A later
# error has another cause: a library swallowed the KeyboardInterrupt, and the program went on
FOLLOWS = 60.0


@contextmanager
def ended_by_ctrl_c(line: Callable[[], str]) -> Iterator[None]:
    """Write the text that `line` returns and end the process with `STATUS` after Ctrl-C inside the block.

    Ctrl-C raises `KeyboardInterrupt` in the block, so `finally` clauses there clean up first. Errors that follow from
    Ctrl-C, for example in a collective whose other rank has ended, are not shown. Enter the block before torch is
    imported.
    """
    pressed: float | None = None  # monotonic time of the first Ctrl-C

    def interrupt(*_: object) -> None:
        nonlocal pressed
        if pressed is None:
            pressed = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - pressed > SECONDS:
            os._exit(STATUS)

    def exit_at_once() -> None:
        if pressed is not None:
            os._exit(STATUS)

    # atexit calls the latest handler first, so this one comes after those of libraries. It skips Python's own
    # finalization, which takes 7 s
    atexit.register(exit_at_once)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        pressed = None  # the block ended well: a library may have swallowed the KeyboardInterrupt
    except BaseException as error:
        is_late = pressed is not None and time.monotonic() - pressed > FOLLOWS
        if is_late and not isinstance(error, KeyboardInterrupt):
            pressed = None
        if pressed is None:
            raise
        sys.stdout.flush()
        text = line()
        sys.stderr.write(f"\n{text}\n" if text else "")
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # hide what libraries print as they end
        sys.exit(STATUS)
    finally:
        if pressed is None:  # otherwise `interrupt` stays until the process ends
            signal.signal(signal.SIGINT, before)
