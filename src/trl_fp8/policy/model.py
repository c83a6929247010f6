"""The trained model inside its wrappings, and which of its adapters take part in a forward."""

from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel


def is_reference(model: nn.Module) -> bool:
    """A PEFT policy is its own reference while adapters are disabled, or TRL's `ref` adapter is active."""
    if not is_peft_model(model):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return any(layer.disable_adapters or "ref" in layer.active_adapters for layer in layers)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT, DDP or FSDP2 wrappings."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model, whose attention could be observed.")
