"""Properties of the trained model, and repairs of its processor and of a model from a quantized checkpoint.

A policy that starts from an FP8 checkpoint such as Qwen3-8B-FP8, or from GPT-OSS with its experts in MXFP4, is trained
and saved in high precision. `dequantizing_config` and `in_high_precision` are for this purpose, because transformers
5.17 by itself goes wrong:

- On a GPU it keeps the quantized weights, which cannot be trained.
- Where it dequantizes the weights, `save_pretrained` quantizes them again, incorrectly. A model from FP8 is saved with
  every matrix in FP8, embeddings and output head included. A model from MXFP4 is saved with the experts of only one
  layer, under wrong names. In both cases `quantization_config` is dropped, so the saved model loads as noise.
- Experts from MXFP4 are in BF16, whatever dtype was requested.
"""

from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, FineGrainedFP8Config, Mxfp4Config, PreTrainedModel, ProcessorMixin

from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.formats import BLOCKS, format_stored
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import expert_modules


_SCALES = BLOCKS.scale_attribute, "_scales"  # ends of the names of scales in FP8 and in MXFP4 checkpoints


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside PEFT, DDP or FSDP2 wrappers."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model, whose attention could be observed.")


def decoder_input(args: tuple, kwargs: dict) -> Tensor | None:
    """Return the token ids `[B, T]`, or embeddings `[B, T, K]`, with which a decoder is called, or None."""
    for tensor in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args):
        if tensor is not None:
            return tensor
    return None


def is_reference(model: nn.Module) -> bool:
    """Return whether a PEFT policy is its own reference now: adapters are off, or TRL's `ref` adapter is active."""
    if not is_peft_model(model):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return any(layer.disable_adapters or "ref" in layer.active_adapters for layer in layers)


def dequantizing_config(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> FineGrainedFP8Config | Mxfp4Config | None:
    """Return the config that makes `from_pretrained` dequantize the checkpoint `model`; None if it is not quantized.

    Raises `ValueError` for another quantization than FP8 or MXFP4, and for FP8 weights with one scale each, because
    transformers 5.17 would drop those scales without an error.
    """
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    if method == "mxfp4":
        return Mxfp4Config.from_dict(stored | {"dequantize": True})
    if method is None:
        return None
    if method != "fp8":
        raise ValueError(
            f"model={model!r} is quantized ({method}). Training starts from checkpoints in high precision, block FP8 "
            "or MXFP4: take the one that this was made from."
        )
    spec = format_stored(stored.get("weight_block_size"))
    if spec is not None and spec.why_no_start:
        raise ValueError(
            f"model={model!r} is an FP8 checkpoint with {spec.why_no_start}. Start from the high-precision "
            "checkpoint, or from an FP8 one in 128x128 blocks."
        )
    return FineGrainedFP8Config.from_dict(stored | {"dequantize": True})


def require_countable_experts(model: nn.Module, coefficient: float | None) -> None:
    """Raise `ValueError` if TRL 1.16 would compute a load-balancing loss without finding the number of experts.

    `coefficient` is the flag router_aux_loss_coef. With None the coefficient in the model's config counts.
    """
    config = transformers_model(model).config.get_text_config()
    if coefficient is None:
        coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    if coefficient and hasattr(config, "output_router_logits") and not hasattr(config, "num_experts"):
        raise ValueError(
            f"router_aux_loss_coef={coefficient} with a model of type {config.model_type!r}: TRL's load-balancing "
            "loss asks its config for num_experts, which it has under another name. Set router_aux_loss_coef=0.0."
        )


def in_high_precision(model: nn.Module) -> None:
    """Give a dequantized policy one dtype, and keep `model.save_pretrained` from quantizing it.

    Raises `ValueError` if the policy has FP8 weights.
    """
    fp8_names = [name for name, parameter in model.named_parameters() if parameter.dtype == E4M3]
    if fp8_names:
        raise ValueError(
            f"model was loaded in FP8 ({listed(fp8_names, 1)} are float8_e4m3fn), which cannot be trained. Pass its "
            "name to the trainer, or load it with quantization_config=FineGrainedFP8Config(dequantize=True)."
        )
    base = transformers_model(model)
    # Drop the conversions that read scales: they dequantized the checkpoint, and save_pretrained would revert them
    conversions = getattr(base, "_weight_conversions", None) or []
    remaining = []
    for conversion in conversions:
        reads_scales = any(name.endswith(_SCALES) for name in conversion.source_patterns)
        if not reads_scales:
            remaining.append(conversion)
    if len(remaining) < len(conversions):
        base._weight_conversions = remaining
        for _, experts in expert_modules(base):  # in BF16 if they were dequantized from MXFP4
            experts.to(base.dtype)


def make_lists(processor: ProcessorMixin) -> None:
    """Make `processor` return several prompts as lists from now on, unless a call asks for tensors.

    TRL 1.16 tokenizes prompts of many lengths at once, which only lists can hold. Some processors, such as Mistral
    3's, return one tensor by default, and TRL has no way to change that.
    """
    options = getattr(processor, "valid_processor_kwargs", None)
    defaults = getattr(options, "_defaults", {})
    common = dict(defaults.get("common_kwargs", {}))
    if common.pop("return_tensors", None) is None:
        return

    class Lists(options, total=False):
        _defaults = defaults | {"common_kwargs": common}

    processor.valid_processor_kwargs = Lists
