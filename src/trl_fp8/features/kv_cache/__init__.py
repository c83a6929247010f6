"""FP8 KV cache: scales calibrated on the policy, written to the engine, simulated in the trainer's attention."""

from collections.abc import Iterator

from trl_fp8.run.feature import Registration
from trl_fp8.upstream.patches import ON_INSTANCES, register

from .kv_cache_flags import KVCacheFlags


register(
    ON_INSTANCES,
    {
        "trl.GRPOTrainer._batch_environments": (
            "features/kv_cache/kv_cache.py",
            "TRL sets the tools of a batch's environments when it generates; we need them for prompts before.",
        ),
    },
)


def _features(trainer) -> Iterator:
    if trainer.args.kv_cache_dtype != "auto":
        from .kv_cache import KVCache

        yield KVCache(trainer, trainer.recipe)


REGISTRATION = Registration(flags=KVCacheFlags, features=_features)
