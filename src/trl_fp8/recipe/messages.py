"""Lists of names inside messages."""

from collections.abc import Iterable


def listed(names: Iterable[str], most: int = 6, between: str = ", ") -> str:
    """For a message: the first `most` of what may be hundreds, and how many more there are."""
    names = list(names)
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return between.join([*names[:most], *more])
