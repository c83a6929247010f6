"""What a feature registers: one `Registration` in the `__init__.py` of its folder, one line in features/__init__.py.

The core calls it in this order. All but the flags may stay empty.

    flags        mixed into the config: declared, resolved, checked
    construct    around the making of TRL's trainer: the policy is not loaded yet, or was given
    features     the policy is there, the engine is not: objects with the hooks of run/feature.py
                 (their `engine_part()` is what the engine gets for them)
    commands     words of the console script
    warnings     what a report says of logged metrics, under the facts of the run (run/facts.py)
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .flag import FlagGroup


if TYPE_CHECKING:
    from trl_fp8.rollouts import FP8Rollouts

    from .feature import Feature


@dataclass
class Construction:
    """What a trainer is about to be made of. A registration may change it."""

    args: Any  # the config
    given: dict[str, Any]  # the other arguments of TRL's trainer, by their names
    create_model: Callable  # TRL's `create_model_from_path`, or what stands in for it
    dequantizes: bool = True  # an FP8 checkpoint is loaded in high precision
    kept: dict[str, Any] = field(default_factory=dict)  # by folder: what a registration keeps for its features


def _nothing(making: Construction) -> AbstractContextManager[None]:
    return nullcontext()


def _none(trainer: "FP8Rollouts") -> "Iterable[Feature]":
    return ()


def _silent(metrics: Mapping[str, float], facts: Mapping[str, Any]) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Command:
    """A word of the console script."""

    word: str
    text: str  # for --help
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], str]  # what is printed


@dataclass(frozen=True)
class Registration:
    """One optional capability."""

    flags: type[FlagGroup] | None = None
    construct: Callable[[Construction], AbstractContextManager[None]] = _nothing
    features: Callable[["FP8Rollouts"], "Iterable[Feature]"] = _none
    commands: tuple[Command, ...] = ()
    warnings: Callable[[Mapping[str, float], Mapping[str, Any]], dict[str, str]] = _silent
    needs: str = ""  # a field of TRL's config without which a trainer cannot have this feature
