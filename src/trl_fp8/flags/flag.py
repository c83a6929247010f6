"""A field of a configuration with its help text: the one place where a flag is described."""

from dataclasses import field
from typing import Any


def flag(default: Any, text: str) -> Any:
    """A dataclass field with a default; `text` is its line in --help and in docs/configuration.md."""
    return field(default=default, metadata={"help": text})
