"""Groups of flags that `FP8GRPOConfig` is made of, each with the checks that concern it alone."""

from dataclasses import field
from typing import Any


def flag(default: Any, text: str) -> Any:
    """A dataclass field; `text` is its line in --help and in docs/configuration.md, and stands nowhere else."""
    return field(default=default, metadata={"help": text})
