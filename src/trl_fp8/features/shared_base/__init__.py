"""FP8 base with adapters: frozen FP8 weights exist once, in the engine; a sync sends only adapters."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from trl_fp8.run.feature import Construction, Registration, ServerFlag
from trl_fp8.upstream.patches import FOR_ONE_BLOCK, ON_INSTANCES, register

from .base_flags import BaseFlags


register(
    FOR_ONE_BLOCK,
    {
        "transformers.modeling_utils.get_hf_quantizer": (
            "features/shared_base/stored_base.py",
            "transformers takes a quantizer of the checkpoint's kind alone; we need one that loads no base weights.",
        ),
        "vllm.model_executor.model_loader.base_loader.initialize_model": (
            "features/shared_base/engine_adapters.py",
            "vLLM compiles the model that it made here; we need the layers of adapters in it by then.",
        ),
    },
)
register(
    ON_INSTANCES,
    {
        "transformers.initialization._is_hf_initialized": (
            "features/shared_base/stored_base.py",
            "transformers initializes parameters that were not loaded; we need placeholders left alone.",
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


def _part_of_server(lora: str) -> object:
    from .engine_served import ServedAdapters  # needs vllm

    return ServedAdapters(lora)


LORA = ServerFlag(
    "--lora",
    "JSON",
    "room for the adapters of a trainer with fp8_base=True: arguments of PEFT's LoraConfig, such as "
    """'{"r": 32, "target_modules": "all-linear"}'""",
    _part_of_server,
)
REGISTRATION = Registration(flags=BaseFlags, construct=_construct, features=_features, server_flags=(LORA,))
