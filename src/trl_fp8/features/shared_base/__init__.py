"""FP8 base with adapters: frozen FP8 weights live once, in the engine; a sync sends adapters alone."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from trl_fp8.run.registration import Construction, Registration

from . import base_patches  # noqa: F401, adds to the register of patches
from .base_flags import BaseFlags


if TYPE_CHECKING:
    from trl_fp8.run.feature import Feature


def _construct(making: Construction) -> AbstractContextManager[None]:
    from .loading import without_base

    return without_base(making)


def _features(trainer) -> "Iterator[Feature]":
    if trainer.args.fp8_base:
        from .base_in_engine import BaseInEngine

        yield BaseInEngine(trainer)


REGISTRATION = Registration(flags=BaseFlags, construct=_construct, features=_features)
