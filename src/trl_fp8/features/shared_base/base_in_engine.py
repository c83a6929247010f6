"""The trainer's side of an FP8 base: a policy without its base, the share in the engine's, and what an export says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel

from trl_fp8.run.feature import Construction, Feature

from .adaptable import require_adaptable, require_apart, require_trainable_base
from .held_base import HeldBase, SharedBase, require_own_weights
from .stored_base import load_without_base


SOURCE = "shared_base"  # key of the handover: where the base's weights come from
logger = get_logger(__name__)


@contextmanager
def without_base(construction: Construction) -> Iterator[None]:
    """Take the FP8 weights out of a model object, or never load them, while TRL's trainer is constructed.

    A model object has its weights again if the construction fails.
    """
    args = construction.args
    model = construction.trainer_kwargs["model"]
    adapters = construction.trainer_kwargs.get("peft_config")
    if not args.fp8_base:
        if not isinstance(model, str):
            require_own_weights(model)
        yield
        return
    loading = args.model_init_kwargs or {}
    quantization = construction.trainer_kwargs.get("quantization_config") or loading.get("quantization_config")
    require_trainable_base(args, adapters, quantization)
    construction.dequantizes = False  # codes of an FP8 checkpoint are taken as they are
    if isinstance(model, str):
        create = construction.create_model

        def loaded(name: str, **loading: Any) -> PreTrainedModel:
            """Load a model without its base. TRL calls this in place of its `create_model_from_path`."""
            # What is trained as a whole is FP32, as TRL loads it
            if getattr(adapters, "modules_to_save", None) or getattr(adapters, "bias", "none") != "none":
                loading = {"dtype": torch.float32} | loading
            model, source = load_without_base(create, name, args.recipe_for, **loading)
            construction.handover[SOURCE] = source
            require_apart(model, adapters, source.recipe)
            return model

        construction.create_model = loaded
        yield
        return
    recipe = args.recipe_for(model)
    require_apart(model, adapters, recipe)
    base = HeldBase(model, recipe)
    construction.handover[SOURCE] = base
    try:
        yield
    except BaseException:
        base.restore()
        raise


class BaseInEngine(Feature):
    """Shares the base with the engine. The run's recipe is the base's: codes of a checkpoint have their own."""

    def __init__(self, trainer):
        super().__init__(trainer)
        source = trainer.handover.pop(SOURCE)
        trainer.recipe = source.recipe
        require_adaptable(trainer.model, source.recipe)
        self.base = SharedBase(trainer.model, source, trainer.accelerator.device)

    def engine_part(self):
        from .engine_base import BasePart  # needs vllm

        return BasePart(self.base)

    def banner(self) -> str:
        return "on the engine's FP8 base; syncs send adapters"

    def facts(self) -> dict[str, object]:
        return {
            "adapters": "beside FP8 weights that engine and trainer share, not merged: Q(W) x + B A x",
            "each_sync_sends": "adapters",
            "fp8_weights_written": "once",
        }

    def merge_note(self, what: str) -> str:
        into = "the original weights"
        if isinstance(self.base.original, str):
            into = "dequantized FP8 weights"
            logger.warning(f"{what}: adapters are merged into {into}, because {self.base.original}.")
        return (
            f"Adapters are merged into {into}: W + s B A, in FP32. The engine that they were trained with computed "
            "Q(W) x + B A x, Q to FP8. "
        )
