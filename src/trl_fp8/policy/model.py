"""The trained model: inside its wrappings, as its own reference, and started from an FP8 checkpoint.

From an FP8 checkpoint such as Qwen3-8B-FP8 a policy is trained, and saved, in high precision. transformers 5.17 would
keep FP8 linears that cannot be trained on a GPU, and dequantizes on CPU. Either way it remembers how the weights were
converted and undoes that in `save_pretrained`: it quantizes every matrix, embeddings and output head included, and
drops `quantization_config`, so that the saved model loads as noise.
"""

from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoConfig, FineGrainedFP8Config, PreTrainedModel

from trl_fp8.quantization.e4m3 import E4M3
from trl_fp8.recipe.names import listed


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT, DDP or FSDP2 wrappings."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model, whose attention could be observed.")


def is_reference(model: nn.Module) -> bool:
    """A PEFT policy is its own reference while adapters are disabled, or TRL's `ref` adapter is active."""
    if not is_peft_model(model):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return any(layer.disable_adapters or "ref" in layer.active_adapters for layer in layers)


def dequantizing_config(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> FineGrainedFP8Config | None:
    """What makes `from_pretrained` dequantize the checkpoint `model`; None if it is not in FP8.

    `ValueError` if its weights have one scale each: transformers 5.17 would drop those scales without an error.
    """
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") != "fp8":
        return None
    if stored.get("weight_block_size") is None:
        raise ValueError(
            f"model={model!r} is an FP8 checkpoint with one scale per weight (no weight_block_size in its config), "
            "which transformers reads without its scales. Start from the high-precision checkpoint, or from an FP8 "
            "one in 128x128 blocks."
        )
    return FineGrainedFP8Config.from_dict(stored | {"dequantize": True})


def save_in_high_precision(model: nn.Module) -> None:
    """Make `model.save_pretrained` write a dequantized policy as it is. `ValueError` if it holds FP8 weights."""
    if names := [name for name, parameter in model.named_parameters() if parameter.dtype == E4M3]:
        raise ValueError(
            f"model was loaded in FP8 ({listed(names, 1)} are float8_e4m3fn), which cannot be trained. Pass its name "
            "to the trainer, or load it with quantization_config=FineGrainedFP8Config(dequantize=True)."
        )
    base = transformers_model(model)
    if conversions := getattr(base, "_weight_conversions", None):
        base._weight_conversions = [one for one in conversions if "weight_scale_inv" not in one.source_patterns]
