"""Registration of a feature: one `Registration` in the `__init__.py` of its folder, one line in features/__init__.py.

The core reads its fields in this order. All but the flags may stay empty.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from .flag import FlagGroup


@dataclass
class Construction:
    """Arguments that a trainer is about to be made of. A registration may change them."""

    args: Any  # the config
    given: dict[str, Any]  # the other arguments of TRL's trainer, by their names
    create_model: Callable  # TRL's `create_model_from_path`, or what stands in for it
    dequantizes: bool = True  # an FP8 checkpoint is loaded in high precision
    kept: dict[str, Any] = field(default_factory=dict)  # by folder: what a registration keeps for its features


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

    # Mixed into the config: declared, resolved, checked
    flags: type[FlagGroup] | None = None
    # Around the making of TRL's trainer: the policy is not loaded yet, or was given
    construct: Callable[[Construction], AbstractContextManager[None]] = lambda making: nullcontext()
    # Of a trainer that has its policy and no engine yet: objects with the hooks of `run.feature.Feature`
    features: Callable[[Any], Iterable[Any]] = lambda trainer: ()
    # Words of the console script
    commands: tuple[Command, ...] = ()
    # What a report says of logged metrics, under the facts of the run (run/facts.py)
    warnings: Callable[[Mapping[str, float], Mapping[str, Any]], dict[str, str]] = lambda metrics, facts: {}
    # A field of TRL's config without which a trainer cannot have this feature
    needs: str = ""
