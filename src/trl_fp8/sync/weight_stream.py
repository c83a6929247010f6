"""The policy as the tensors of an FP8 checkpoint, one at a time, under a checkpoint's names: what a sync writes.

FP8 weight   -> rounded to BF16, Q(W)      "...q_proj.weight" e4m3, "...q_proj.weight_scale_inv" fp32
any other    -> rounded to BF16, or, where an engine holds it in FP32, as it is
buffers      -> as they are
last: "<decoder>.layers.<i>.self_attn.{q,k,v}_scale"  from KVScales
"""

from collections.abc import Iterable, Iterator

import torch

from trl_fp8.quantization.kv_scales import QKV, KVScales
from trl_fp8.recipe.names import is_fp32
from trl_fp8.recipe.recipe import FP8Recipe

from .writer import Named, by_scale


def weight_stream(
    parameters: Iterable[Named], recipe: FP8Recipe, kv_scales: KVScales | None = None, buffers: Iterable[Named] = ()
) -> Iterator[Named]:
    """`(name in a checkpoint, tensor)` of a policy's `(checkpoint name, full tensor)`.

    What is BF16 already is the policy's own: the consumer copies it before it asks for the next. Besides what it holds
    the copies of one parameter are alive, or of the two or three that share a scale.
    """
    for weights in by_scale(parameters, recipe, recipe.fp8_tensors, copy=True):
        rounded = [weight.detach().to(_dtype(name, recipe)) for name, weight in weights.items()]
        if recipe.fp8_tensors.issuperset(weights):
            quantized = recipe.format.quantize_weights(rounded, recipe.scale_format)
            for name, codes in zip(weights, quantized, strict=True):
                yield recipe.stored_name(name), codes.qdata
                yield recipe.stored_name(name + recipe.format.scale_suffix), recipe.format.sent_scale(codes)
        else:
            yield from zip(map(recipe.stored_name, weights), rounded, strict=True)
    for name, buffer in buffers:
        yield recipe.stored_name(name), buffer.detach()
    for layer in kv_scales.layers if kv_scales is not None else ():
        if layer not in recipe.kv_cache_skip_layers:
            for which, value in zip(QKV, kv_scales.values[layer], strict=True):
                yield recipe.stored_name(f"{recipe.decoder}.layers.{layer}.self_attn.{which}_scale"), value.clone()


def _dtype(name: str, recipe: FP8Recipe) -> torch.dtype:
    return torch.float32 if is_fp32(name, recipe.model_type) else torch.bfloat16
