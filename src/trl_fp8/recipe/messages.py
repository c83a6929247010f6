"""Lists of names and sizes inside messages."""

from collections.abc import Iterable


def listed(names: Iterable[str], most: int = 6, between: str = ", ") -> str:
    """Return the first `most` of many names, and how many more there are."""
    names = list(names)
    parts = names[:most]
    if len(names) > most:
        parts.append(f"and {len(names) - most} more")
    return between.join(parts)


def format_bytes(count: float) -> str:
    """Return a size in words: `1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
