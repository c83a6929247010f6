"""Lines for the user: above a progress bar if there is one, and for a step that turns out slow what it is doing."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm


PATIENCE = 3.0  # seconds without a word


def on_terminal() -> bool:
    """Whether bars are seen as such: they go to stderr."""
    return sys.stderr.isatty()


def say(text: str) -> None:
    """Print a line at once, where no bar is torn by it."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


@contextmanager
def slow_step(text: str, shown: bool = True) -> Iterator[None]:
    """Say `text` if the block takes longer than `PATIENCE`. `shown` is False on ranks that have nothing to say."""
    done = Event()
    if shown:
        Thread(target=lambda: done.wait(PATIENCE) or say(text), daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Warnings(logging.Handler):
    """Warnings of this package while a bar is drawn: their first sentence above it, the whole text when it is gone.

    Where the user configured logging, warnings go there and nowhere else.
    """

    def __init__(self):
        super().__init__(logging.WARNING)
        self._whole: list[str] = []

    def begin(self) -> None:
        if not (ours := logging.getLogger("trl_fp8")).hasHandlers():
            ours.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub(r"^\[RANK 0\] ", "", record.getMessage())  # accelerate's, also on one process
        first, more, _ = text.partition(". ")
        say(f"warning: {first.rstrip('.')}")
        self._whole += [text] if more else []

    def end(self) -> None:
        logging.getLogger("trl_fp8").removeHandler(self)
        for text in self._whole:
            say(f"\nwarning: {text}")
        self._whole.clear()
