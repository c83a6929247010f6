"""The engine's KV cache scales: where vLLM keeps them, and proof that they are the ones that were sent.

vLLM keeps each scale three times: a device tensor that CUDA kernels read, a Python float that the CPU kernel and
FlashInfer read, and for k and v a tensor on the host. It is no error if a new one reaches only some of them: so all
are read back and compared.
"""

from collections.abc import Collection

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention

from trl_fp8.quantization.kv_scales import QKV, KVScales
from trl_fp8.recipe.names import listed
from trl_fp8.recipe.servable import REMEDY


# Attention implementations (vLLM 0.31) that read the scales anew in each forward, from the device tensors
# (FlashAttention 3, Triton) or from the host floats (the CPU reference)
READ_EACH_TIME = ("FlashAttentionImpl", "TritonAttentionImpl", "ReferenceFp8AttentionImpl")
# `EngineNumerics.attention_weight_offset` where q is e4m3: Max_offset = 8 in FlashAttention 3
# (hopper/flash_fwd_kernel_sm90.h), none in v1/attention/ops/triton_unified_attention.py
WEIGHT_OFFSETS = {"FlashAttentionImpl": 2.0**8, "TritonAttentionImpl": 1.0}


def attention_layers(model: nn.Module) -> dict[int, Attention]:
    """The engine's attention modules by decoder layer number; `RuntimeError` if names do not tell the layer."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            numbers = [part for part in name.split(".") if part.isdigit()]
            if len(numbers) != 1 or int(numbers[0]) in layers:
                raise RuntimeError(f"cannot tell the decoder layer of the engine's attention module {name!r}.")
            layers[int(numbers[0])] = module
    return dict(sorted(layers.items()))


def fp8_attention_layers(model: nn.Module, skip_layers: Collection[int] = ()) -> dict[int, Attention]:
    """The attention modules whose cache is FP8. `RuntimeError` lists layers that have a cache of another type than the
    recipe says, or whose implementation may keep copies of the scales.
    """
    layers = attention_layers(model)
    if list(layers) != list(range(len(layers))):
        raise RuntimeError(
            f"kv_cache_dtype='fp8': the engine has attention with a KV cache in layers {list(layers)} only, so that "
            f"scales cannot be assigned to decoder layers. {REMEDY}."
        )
    wrong = [
        f"layer {layer}: KV cache of type {module.kv_cache_dtype}"
        for layer, module in layers.items()
        if module.kv_cache_dtype.startswith("fp8") == (layer in skip_layers)
    ]
    fp8 = {layer: module for layer, module in layers.items() if layer not in skip_layers}
    wrong += [
        f"layer {layer}: {name} may keep copies of the scales (FlashInfer does, and bakes them into CUDA graphs)"
        for layer, module in fp8.items()
        if (name := type(module.impl).__name__) not in READ_EACH_TIME
    ]
    if wrong:
        raise RuntimeError(
            f"the engine's KV cache cannot be recalibrated ({len(wrong)} problems):\n  "
            + listed(wrong, 8, "\n  ")
            + "\n"
            "Remove attention_backend and kv_cache_dtype_skip_layers from vllm_engine_kwargs; expected are "
            f"{READ_EACH_TIME}."
        )
    return fp8


def quantizes_query(model: nn.Module) -> bool:
    """`EngineNumerics.query_rounded`: FlashAttention 3 and Triton do, the CPU reference does not."""
    return any(module.query_quant is not None for module in attention_layers(model).values())


def attention_weight_offset(model: nn.Module) -> float | None:
    """As in `EngineNumerics`."""
    rounding = [module.impl for module in attention_layers(model).values() if module.query_quant is not None]
    found = {WEIGHT_OFFSETS.get(type(impl).__name__) for impl in rounding}
    return found.pop() if len(found) == 1 else None


def verify_kv_scales(model: nn.Module, expected: KVScales, skip_layers: Collection[int] = ()) -> None:
    """Compare every copy of every scale in an engine's model with `expected`, what was sent; layers of `skip_layers`
    have none. `RuntimeError` lists each copy that differs, by layer and name. Waits for the device once.
    """
    layers = attention_layers(model)
    if list(layers) != list(range(len(expected))):
        raise RuntimeError(
            f"KV scales were calibrated for {len(expected)} layers, but the engine's attention layers are "
            f"{list(layers)}: scales cannot be assigned."
        )
    layers = {layer: module for layer, module in layers.items() if layer not in skip_layers}
    on_device = torch.stack([getattr(module, f"_{which}_scale") for module in layers.values() for which in QKV])
    held = on_device.view(-1, len(QKV)).tolist()
    wrong = []
    for (layer, module), on_device_3 in zip(layers.items(), held, strict=True):
        for column, which in enumerate(QKV):
            sent = expected.scale(layer, which)
            copies = {"device tensor": on_device_3[column], "host float": getattr(module, f"_{which}_scale_float")}
            if which != "q":  # vLLM keeps no host tensor of q's scale
                copies["host tensor"] = getattr(module, f"_{which}_scale_cpu").item()
            wrong += [
                f"layer {layer} {which}_scale: {copy} holds {value:g}, sent {sent:g}"
                for copy, value in copies.items()
                if value != sent
            ]
    if wrong:
        raise RuntimeError(
            f"KV cache scales did not arrive in the engine ({len(wrong)} copies differ):\n  "
            + listed(wrong, 12, "\n  ")
        )
