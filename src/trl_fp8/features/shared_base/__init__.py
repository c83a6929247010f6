"""FP8 base with adapters: frozen FP8 weights exist once, in the engine; a sync sends only adapters."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from trl_fp8.run.feature import Construction, Registration
from trl_fp8.upstream.patches import FOR_ONE_BLOCK, ON_INSTANCES, register

from .base_flags import BaseFlags


register(
    FOR_ONE_BLOCK,
    {
        "transformers.modeling_utils.get_hf_quantizer": (
            "features/shared_base/stored_base.py",
            "A quantizer may empty modules; its config must be of the kind that the checkpoint has.",
        ),
        "vllm.model_executor.model_loader.base_loader.initialize_model": (
            "features/shared_base/engine_adapters.py",
            "Compilers and graphs must see the layers of adapters.",
        ),
    },
)
register(
    ON_INSTANCES,
    {
        "transformers.initialization._is_hf_initialized": (
            "features/shared_base/stored_base.py",
            "Init would write to placeholders.",
        ),
    },
)


def _construct(construction: Construction) -> AbstractContextManager[None]:
    from .base_in_engine import without_base

    return without_base(construction)


def _features(trainer) -> Iterator:
    if trainer.args.fp8_base:
        from .base_in_engine import BaseInEngine

        yield BaseInEngine(trainer)


REGISTRATION = Registration(flags=BaseFlags, construct=_construct, features=_features)
