"""A policy with adapters is made without the FP8 weights that its engine will hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from trl_fp8.run.registration import Construction

from .adaptable import require_apart, require_trainable_base
from .held_base import HeldBase, require_own_weights
from .stored_base import load_without_base


SOURCE = "shared_base"  # what is kept: where the base's weights come from


@contextmanager
def without_base(making: Construction) -> Iterator[None]:
    """Around the making of TRL's trainer: take the FP8 weights out of a model that is given, or never load them.

    A model that was given has its weights again if no trainer comes of it.
    """
    args, model, adapters = making.args, making.given["model"], making.given.get("peft_config")
    if not args.fp8_base:
        if not isinstance(model, str):
            require_own_weights(model)
        yield
        return
    require_trainable_base(args, adapters)
    making.dequantizes = False  # codes of an FP8 checkpoint are taken as they are
    if isinstance(model, str):
        create = making.create_model

        def loaded(name: str, **loading: Any) -> PreTrainedModel:
            """Called by TRL in place of its `create_model_from_path`."""
            # What is trained as a whole is FP32, as TRL loads it
            if getattr(adapters, "modules_to_save", None) or getattr(adapters, "bias", "none") != "none":
                loading = {"dtype": torch.float32} | loading
            made, source = load_without_base(create, name, args.recipe_for, **loading)
            making.kept[SOURCE] = source
            require_apart(made, adapters, source.recipe)
            return made

        making.create_model = loaded
        yield
        return
    recipe = args.recipe_for(model)
    require_apart(model, adapters, recipe)
    base = HeldBase(model, recipe)
    making.kept[SOURCE] = base
    try:
        yield
    except BaseException:
        base.restore()
        raise
