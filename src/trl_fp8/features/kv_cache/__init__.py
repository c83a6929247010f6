"""FP8 KV cache: scales calibrated on the policy, written to the engine, simulated in the trainer's attention."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trl_fp8.run.registration import Registration

from . import cache_patches  # noqa: F401, adds to the register of patches
from .kv_cache_flags import KVCacheFlags


if TYPE_CHECKING:
    from trl_fp8.run.feature import Feature


def _features(trainer) -> "Iterator[Feature]":
    if trainer.args.kv_cache_dtype != "auto":
        from .kv_cache import KVCache

        yield KVCache(trainer, trainer.recipe)


REGISTRATION = Registration(flags=KVCacheFlags, features=_features)
