"""`TimedStream`: how long it took to produce what a consumer asked for."""

import time
from collections.abc import Iterator

from .weight_stream import Named


class TimedStream:
    """An iterator that adds up the seconds spent producing its items."""

    def __init__(self, items: Iterator[Named]):
        self.items, self.seconds = items, 0.0

    def __iter__(self) -> Iterator[Named]:
        return self

    def __next__(self) -> Named:
        start = time.perf_counter()
        try:
            return next(self.items)
        finally:
            self.seconds += time.perf_counter() - start
