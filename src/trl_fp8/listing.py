"""How a message lists things of which there may be hundreds."""

from collections.abc import Iterable


def listed(items: Iterable[str], most: int = 6, between: str = ", ") -> str:
    """The first `most` items, and how many more there are."""
    items = list(items)
    more = len(items) - most
    return between.join([*items[:most], *([f"and {more} more"] if more > 0 else [])])
