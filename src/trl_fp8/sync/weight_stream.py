"""The policy as the tensors of an FP8 checkpoint, one at a time: what a sync writes, under the same names.

FP8 weight   -> rounded to BF16, Q(W)      "...q_proj.weight" e4m3, "...q_proj.weight_scale_inv" fp32
any other    -> rounded to BF16
buffers      -> as they are
last: "model.layers.<i>.self_attn.{q,k,v}_scale"  from KVScales
"""

from collections.abc import Iterable, Iterator

import torch

from trl_fp8.quantization.kv_scales import QKV, KVScales
from trl_fp8.recipe.recipe import FP8Recipe

from .writer import Named


def weight_stream(
    parameters: Iterable[Named], recipe: FP8Recipe, kv_scales: KVScales | None = None, buffers: Iterable[Named] = ()
) -> Iterator[Named]:
    """`(name in the engine, tensor)` of a policy's `(checkpoint name, full tensor)`.

    What is BF16 already is the policy's own: the consumer copies it before it asks for the next. Besides what it holds
    the copies of one parameter are alive, or of the two or three that share a scale.
    """
    due: dict[str, torch.Tensor] = {}  # whose scale is also that of a weight to come
    for name, parameter in parameters:
        group = recipe.sharing_scale(name)
        rounded = parameter.detach().to(torch.bfloat16, copy=len(group) > 1)
        if name not in recipe.fp8_tensors:
            yield recipe.engine_name(name), rounded
            continue
        due[name] = rounded
        if all(peer in due for peer in group):
            weights = [due.pop(peer) for peer in group]
            quantized = recipe.format.quantize_weights(weights, recipe.scale_format)
            for peer, codes in zip(group, quantized, strict=True):
                yield recipe.engine_name(peer), codes.qdata
                yield recipe.scale_name(peer), recipe.format.sent_scale(codes)
    for name, buffer in buffers:
        yield recipe.engine_name(name), buffer.detach()
    for layer, values in enumerate(kv_scales.values if kv_scales is not None else ()):
        if layer not in recipe.kv_cache_skip_layers:
            for which, value in zip(QKV, values, strict=True):
                yield f"model.layers.{layer}.self_attn.{which}_scale", value.clone()
