"""The policy as the tensors of an FP8 checkpoint, one at a time, under a checkpoint's names.

FP8 weight   -> rounded to BF16, Q(W)      "...q_proj.weight" e4m3, and its scales under the name of the format
any other    -> rounded to BF16, or, where an engine holds it in FP32, as it is
buffers      -> as they are
last: "<decoder>.layers.<i>.self_attn.{q,k,v}_scale"  from KVScales
"""

from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import torch

from trl_fp8.quantization.codec.kv_scales import QKV, KVScales
from trl_fp8.quantization.codec.weights import quantize_fused, stored_scale
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import is_fp32
from trl_fp8.recipe.recipe import FP8Recipe


NamedTensor = tuple[str, torch.Tensor]
Weight = TypeVar("Weight")


def by_scale(
    parameters: Iterable[tuple[str, Weight]], recipe: FP8Recipe, expected: Collection[str] = (), copy: bool = False
) -> Iterator[dict[str, Weight]]:
    """Yield parameters one by one, but FP8 weights that share a scale together.

    Args:
        parameters: `(checkpoint name, its tensor or what stands for it)`.
        expected: FP8 weights; a `RuntimeError` at the end names those that were missing.
        copy: The next parameter may change the last one: weights that wait for others of their scale are BF16 copies.
    """
    due: dict[str, Weight] = {}
    missing = set(expected)
    for name, parameter in parameters:
        missing.discard(name)
        group = recipe.sharing_scale(name)
        due[name] = parameter.detach().to(torch.bfloat16, copy=True) if copy and len(group) > 1 else parameter
        if all(peer in due for peer in group):
            yield {peer: due.pop(peer) for peer in group}
    if missing:
        raise RuntimeError(
            f"the policy lacks {len(missing)} weights that the engine expects in FP8: {listed(sorted(missing))}. "
            "Were modules renamed or replaced after the trainer was made?"
        )


def weight_stream(
    parameters: Iterable[NamedTensor],
    recipe: FP8Recipe,
    kv_scales: KVScales | None = None,
    buffers: Iterable[NamedTensor] = (),
) -> Iterator[NamedTensor]:
    """Yield `(name in a checkpoint, tensor)` for a policy's `(checkpoint name, full tensor)`.

    A parameter that is BF16 already is not copied: the consumer copies it before it asks for the next. One parameter
    is copied at a time, or the two or three that share a scale.
    """
    for weights in by_scale(parameters, recipe, recipe.fp8_tensors, copy=True):
        rounded = [
            weight.detach().to(torch.float32 if is_fp32(name, recipe.model_type) else torch.bfloat16)
            for name, weight in weights.items()
        ]
        if recipe.fp8_tensors.issuperset(weights):
            quantized = quantize_fused(rounded, recipe.format, recipe.scale_format)
            for name, codes in zip(weights, quantized, strict=True):
                yield recipe.stored_name(name), codes.qdata
                yield recipe.stored_name(name + recipe.format.scale_suffix), stored_scale(codes, recipe.format)
        else:
            yield from zip(map(recipe.stored_name, weights), rounded, strict=True)
    for name, buffer in buffers:
        yield recipe.stored_name(name), buffer.detach()
    for layer in kv_scales.layers if kv_scales is not None else ():
        if layer not in recipe.kv_cache_skip_layers:
            for which, value in zip(QKV, kv_scales.values[layer], strict=True):
                yield recipe.stored_name(f"{recipe.decoder}.layers.{layer}.self_attn.{which}_scale"), value.clone()
