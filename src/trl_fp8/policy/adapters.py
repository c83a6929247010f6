"""Which of a PEFT model's adapters take part in its forward."""

from accelerate.utils import is_peft_model
from torch import nn


def is_reference(model: nn.Module) -> bool:
    """Whether a PEFT policy is at the moment its own reference: adapters disabled, or TRL's `ref` adapter active.

    Args:
        model: Anything; only PEFT models (inside wrappers, too) can be both.
    """
    if not is_peft_model(model):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return any(layer.disable_adapters or "ref" in layer.active_adapters for layer in layers)
