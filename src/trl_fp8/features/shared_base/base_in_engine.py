"""The trainer's side of a shared FP8 base: the policy is loaded without its base and computes with the engine's.

`without_base`    encloses the construction of TRL's trainer: the policy is loaded without base weights, or loses
                  them. `Construction.handover` passes the source of the weights on to the feature
`BaseInEngine`    the feature of a run: it shares the base with the engine through `engine_part`, and merges
                  adapters into the original weights
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel

from trl_fp8.run.feature import Construction, Feature

from .adaptable import require_adaptable, require_frozen_base, require_trainable_base
from .held_base import HeldBase, SharedBase, require_own_weights
from .stored_base import load_without_base


SOURCE = "shared_base"  # key of the `HeldBase` or `StoredBase` in `Construction.handover`
logger = get_logger(__name__)


@contextmanager
def without_base(construction: Construction) -> Iterator[None]:
    """Enclose the construction of TRL's trainer. With fp8_base the trainer gets a policy without base weights.

    A model object loses its base weights, and gets them back if the construction fails. `ValueError` if the policy
    cannot share its base, and without fp8_base if an earlier engine has the base.
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
    construction.dequantizes = False  # the codes of an FP8 checkpoint are used unchanged
    if isinstance(model, str):
        create = construction.create_model

        def load_adaptable(name: str, **loading: Any) -> PreTrainedModel:
            """Load a model without its base. TRL calls this in place of its `create_model_from_path`."""
            # The base is loaded in BF16 by default. If modules or biases are trained beside the adapters, they need
            # FP32, TRL's default
            trains_modules = bool(getattr(adapters, "modules_to_save", None))
            trains_biases = getattr(adapters, "bias", "none") != "none"
            if trains_modules or trains_biases:
                loading = {"dtype": torch.float32} | loading
            model, source = load_without_base(create, name, args.recipe_for, **loading)
            construction.handover[SOURCE] = source
            require_frozen_base(model, adapters, source.recipe)
            return model

        construction.create_model = load_adaptable
        yield
        return
    recipe = args.recipe_for(model)
    require_frozen_base(model, adapters, recipe)
    base = HeldBase(model, recipe)
    construction.handover[SOURCE] = base
    try:
        yield
    except BaseException:
        base.restore()
        raise


class BaseInEngine(Feature):
    """Shares the base with the engine. It replaces the run's recipe, because an FP8 checkpoint decides what is FP8."""

    def __init__(self, trainer):
        super().__init__(trainer)
        source = trainer.handover.pop(SOURCE)
        trainer.recipe = source.recipe
        require_adaptable(trainer.model, source.recipe)
        # With one forward the trainer has an engine of its own beside the server, and shares the base with its own
        # engine
        self._is_served = trainer.args.vllm_mode == "server" and not trainer.args.policy_calls_engine
        self.base = SharedBase(trainer.model, source, trainer.accelerator.device, self._is_served)

    def engine_part(self):
        if self._is_served:
            from .engine_served import ServedBase as part  # needs vllm
        else:
            from .engine_base import BasePart as part

        return part(self.base)

    def banner(self) -> str:
        return "on the engine's FP8 base; syncs send adapters"

    def facts(self) -> dict[str, object]:
        return {
            "adapters": "beside FP8 weights that engine and trainer share, not merged: Q(W) x + s B A x",
            "each_sync_sends": "adapters",
            "fp8_weights_written": "once",
        }

    def merge_note(self, what: str) -> str:
        into = "the original weights"
        original = self.base.original()
        if isinstance(original, str):
            into = "dequantized FP8 weights"
            logger.warning(f"{what}: adapters are merged into {into}, because {original}.")
        return (
            f"Adapters are merged into {into}: W + s B A, in FP32. The engine that they were trained with computed "
            "Q(W) x + s B A x, where Q rounds to FP8. "
        )
