"""A policy that starts from an FP8 checkpoint such as Qwen3-8B-FP8: trained, and saved, in high precision.

transformers 5.17 would keep FP8 linears that cannot be trained on a GPU, and dequantizes on CPU. Either way it
remembers how the weights were converted and undoes that in `save_pretrained`: it quantizes every matrix, embeddings
and output head included, and drops `quantization_config`, so that the saved model loads as noise.
"""

from torch import nn
from transformers import AutoConfig, FineGrainedFP8Config

from trl_fp8.quantization.e4m3 import E4M3
from trl_fp8.recipe.names import listed

from .model import transformers_model


def dequantizing_config(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> FineGrainedFP8Config | None:
    """What makes `from_pretrained` dequantize the checkpoint `model`; None if it is not in block FP8."""
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") != "fp8":
        return None
    return FineGrainedFP8Config.from_dict(stored | {"dequantize": True})


def save_in_high_precision(model: nn.Module) -> None:
    """Make `model.save_pretrained` write a dequantized policy as it is.

    Raises:
        ValueError: The model holds FP8 weights, so that it was not dequantized.
    """
    if names := [name for name, parameter in model.named_parameters() if parameter.dtype == E4M3]:
        raise ValueError(
            f"model was loaded in FP8 ({listed(names, 1)} are float8_e4m3fn), which cannot be trained. Pass its name "
            "to the trainer, or load it with quantization_config=FineGrainedFP8Config(dequantize=True)."
        )
    base = transformers_model(model)
    if conversions := getattr(base, "_weight_conversions", None):
        base._weight_conversions = [one for one in conversions if "weight_scale_inv" not in one.source_patterns]
