"""A policy with adapters is made without the FP8 weights that its engine will hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from trl_fp8.run.registration import Construction

from .adaptable import require_apart, require_trainable_base
from .held_base import HeldBase, Source, require_own_weights
from .stored_base import load_without_base


if TYPE_CHECKING:
    from trl_fp8.rollouts import FP8Rollouts


_SOURCE = "_trl_fp8_base"  # attribute of a trainer, until `BaseInEngine` takes it over


@contextmanager
def without_base(trainer: "FP8Rollouts", making: Construction) -> Iterator[None]:
    """Around the making of TRL's trainer: take the FP8 weights out of a model that is given, or never load them.

    A model that was given has its weights again if no trainer comes of it.
    """
    args, model, adapters = making.args, making.given["model"], making.given.get("peft_config")
    if not args.fp8_base:
        if not isinstance(model, str):
            require_own_weights(model)
        yield
        return
    require_trainable_base(args, adapters, making.given.get("quantization_config"))
    making.dequantizes = False  # codes of an FP8 checkpoint are taken as they are
    if isinstance(model, str):
        create = making.create_model

        def loaded(name: str, **loading: Any) -> PreTrainedModel:
            """Called by TRL in place of its `create_model_from_path`."""
            # What is trained as a whole is FP32, as TRL loads it
            if getattr(adapters, "modules_to_save", None) or getattr(adapters, "bias", "none") != "none":
                loading = {"dtype": torch.float32} | loading
            made, source = load_without_base(create, name, args.recipe_for, **loading)
            setattr(trainer, _SOURCE, source)
            require_apart(made, adapters, source.recipe)
            return made

        making.create_model = loaded
        yield
        return
    recipe = args.recipe_for(model)
    require_apart(model, adapters, recipe)
    base = HeldBase(model, recipe)
    setattr(trainer, _SOURCE, base)
    try:
        yield
    except BaseException:
        base.restore()
        raise


def take_source(trainer: "FP8Rollouts") -> Source:
    """Where the base's weights come from; once."""
    return vars(trainer).pop(_SOURCE)
