"""The policy as the tensors of an FP8 checkpoint, one at a time, under a checkpoint's names.

FP8 weight     rounded to BF16, then quantized: codes "...q_proj.weight", and scales under this name plus a suffix
other weight   rounded to BF16; in FP32 if engines hold it in FP32
buffer         unchanged
KV scales      at the end, as "<decoder>.layers.<i>.self_attn.{q,k,v}_scale"
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
    """Yield parameters in groups `{checkpoint name: parameter}`. FP8 weights that share one scale form a group; every
    other parameter is a group of its own.

    Args:
        parameters: `(checkpoint name, tensor or a record that stands for it)`.
        expected: Names of FP8 weights that `parameters` must have. A `RuntimeError` at the end names the missing ones.
        copy: Whether to keep copies, in BF16, of weights that wait for others of their scale. Necessary if the source
            may change a tensor when it yields the next one.
    """
    waiting: dict[str, Weight] = {}
    missing = set(expected)
    for name, parameter in parameters:
        missing.discard(name)
        group = recipe.sharing_scale(name)
        if copy and len(group) > 1:
            parameter = parameter.detach().to(torch.bfloat16, copy=True)
        waiting[name] = parameter
        if all(peer in waiting for peer in group):
            yield {peer: waiting.pop(peer) for peer in group}
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
    """Yield `(name in an FP8 checkpoint, tensor)` for a policy's `(checkpoint name, full tensor)`.

    A parameter that is BF16 already is not copied, so the consumer has to copy it before it requests the next one. Any
    other parameter is copied when it is rounded. At most one such copy exists at a time, or two or three copies of
    weights that share a scale.
    """
    for weights in by_scale(parameters, recipe, recipe.fp8_tensors, copy=True):
        rounded = []
        for name, weight in weights.items():
            dtype = torch.float32 if is_fp32(name, recipe.model_type) else torch.bfloat16
            rounded.append(weight.detach().to(dtype))
        if recipe.fp8_tensors.issuperset(weights):
            quantized = quantize_fused(rounded, recipe.format, recipe.scale_format)
            for name, codes in zip(weights, quantized, strict=True):
                yield recipe.stored_name(name), codes.qdata
                yield recipe.stored_name(name + recipe.format.scale_suffix), stored_scale(codes, recipe.format)
        else:
            for name, weight in zip(weights, rounded, strict=True):
                yield recipe.stored_name(name), weight
    for name, buffer in buffers:
        yield recipe.stored_name(name), buffer.detach()
    if kv_scales is None:
        return
    for layer in kv_scales.layers:
        if layer not in recipe.kv_cache_skip_layers:
            for which, value in zip(QKV, kv_scales.values[layer], strict=True):
                yield recipe.stored_name(f"{recipe.decoder}.layers.{layer}.self_attn.{which}_scale"), value.clone()
