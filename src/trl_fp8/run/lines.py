"""Lines for the user, above a progress bar if there is one. Imports no torch: a command says them as it starts."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm


PATIENCE = 3.0  # seconds that a step may take without a word


def on_terminal() -> bool:
    """Return whether stderr, where bars go, is a terminal."""
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
    """Warnings of this package as lines above a bar, if the user has not configured where they go."""

    def __init__(self):
        super().__init__(logging.WARNING)

    def begin(self) -> None:
        if not (ours := logging.getLogger("trl_fp8")).hasHandlers():
            ours.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().removeprefix("[RANK 0] ")  # accelerate writes it, also where there is one process
        tqdm.write(f"warning: {text}", file=sys.stderr)

    def end(self) -> None:
        logging.getLogger("trl_fp8").removeHandler(self)
