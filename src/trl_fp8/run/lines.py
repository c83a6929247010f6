"""Lines for the user, above a progress bar if there is one.

This module must not import torch, because commands print before that slow import is done.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from threading import Event, Thread

from tqdm import tqdm


PATIENCE = 3.0  # seconds that a step may take before a line says why


def on_terminal() -> bool:
    """Return whether stderr, where bars go, is a terminal."""
    return sys.stderr.isatty()


def say(text: str) -> None:
    """Print a line at once, without tearing a progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


@contextmanager
def slow_step(text: str, shown: bool = True) -> Iterator[None]:
    """Print `text` if the block takes longer than `PATIENCE`. Print nothing if not `shown`."""
    done = Event()

    def wait() -> None:
        if not done.wait(PATIENCE):
            say(text)

    if shown:
        Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def did_you_mean(name: str, known: Iterable[str], otherwise: str = ".") -> str:
    """Return the end of an error about an unknown name: a question with the closest known name, or `otherwise`."""
    close = get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else otherwise


class Warnings(logging.Handler):
    """A log handler that prints warnings of this package above a progress bar, if no other handler is configured."""

    def __init__(self):
        super().__init__(logging.WARNING)

    def begin(self) -> None:
        logger = logging.getLogger("trl_fp8")
        if not logger.hasHandlers():
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().removeprefix("[RANK 0] ")  # accelerate writes it, also where there is one process
        tqdm.write(f"warning: {text}", file=sys.stderr)

    def end(self) -> None:
        logging.getLogger("trl_fp8").removeHandler(self)
