"""The engine's KV cache scales: where vLLM keeps them, and proof that they are the ones that were sent.

vLLM keeps each scale as a device tensor, which CUDA kernels read, and as a Python float, which the CPU kernel and
FlashInfer read. Those of k and v are also in a tensor on the host. A write might reach only some of these copies, so
all of them are read and compared.
"""

from collections.abc import Collection, Mapping

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention

from trl_fp8.quantization.codec.kv_scales import QKV, KVScales
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.servable import REMEDY

from .numerics import attention_layers


# Attention implementations that read the scales anew in each forward
READ_EACH_TIME = frozenset(
    "FlashAttentionImpl InvariantFlashAttentionImpl ReferenceAttentionImpl ReferenceLatentImpl TritonAttentionImpl "
    "TritonMLAImpl".split()
)


def fp8_attention_layers(
    model: nn.Module, kv_layers: Collection[int], skip_layers: Collection[int] = ()
) -> dict[int, Attention | MLAAttention]:
    """Return layer number -> attention module for the layers with an FP8 cache.

    Raises:
        RuntimeError: The layers with a cache are not `kv_layers`, those without an FP8 cache are not `skip_layers`, or
            a layer with an FP8 cache may keep further copies of its scales.
    """
    layers = attention_layers(model)
    if list(layers) != list(kv_layers):
        raise RuntimeError(
            f"kv_cache_dtype='fp8': the engine has attention with a KV cache in layers {list(layers)}, the policy in "
            f"{list(kv_layers)}, so scales cannot be assigned to decoder layers. {REMEDY}."
        )
    wrong = []
    for layer, module in layers.items():
        is_fp8 = module.kv_cache_dtype.startswith("fp8")
        should_be_fp8 = layer not in skip_layers
        if is_fp8 != should_be_fp8:
            wrong.append(f"layer {layer}: KV cache of type {module.kv_cache_dtype}")
    fp8 = {layer: module for layer, module in layers.items() if layer not in skip_layers}
    kinds = {layer: type(module.impl).__name__ for layer, module in fp8.items()}
    wrong += [
        f"layer {layer}: {kind} may keep copies of the scales (FlashInfer does, and bakes them into CUDA graphs)"
        for layer, kind in kinds.items()
        if kind not in READ_EACH_TIME
    ]
    if wrong:
        problems = listed(wrong, 8, "\n  ")
        raise RuntimeError(
            f"the engine's KV cache cannot be recalibrated ({len(wrong)} problems):\n  {problems}\nLet the engine "
            "choose its attention backend (remove attention_backend), or set kv_cache_dtype='auto'. Scales can be "
            f"recalibrated with {', '.join(sorted(READ_EACH_TIME))}."
        )
    return fp8


class KVScaleCopies:
    """Writes and verifies all copies of the scales of an engine's FP8 caches (`engine.protocol.KVScaleStore`).

    Args:
        layers: Layer number -> attention module.
    """

    def __init__(self, layers: Mapping[int, Attention | MLAAttention]):
        self._layers = layers

    def write(self, scales: KVScales) -> None:
        sent_L3 = torch.stack([scales.values[layer] for layer in self._layers])
        on_device, on_host = self._tensors()
        moved_L3 = sent_L3.to(on_device[0].device, non_blocking=True)
        torch._foreach_copy_(on_device, list(moved_L3.flatten().unbind()))
        torch._foreach_copy_(on_host, list(sent_L3[:, 1:].flatten().unbind()))  # k and v
        for layer, module in self._layers.items():
            for which in QKV:
                setattr(module, f"_{which}_scale_float", scales.scale(layer, which))

    def verify(self, scales: KVScales) -> None:
        """Raise `RuntimeError` that lists the copies which differ from `scales`. Waits for the device once."""
        on_device, on_host = self._tensors()
        device_L3 = torch.stack(on_device).view(len(self._layers), 3).tolist()
        host_L2 = torch.stack(on_host).view(len(self._layers), 2).tolist()
        wrong = []
        for row, (layer, module) in enumerate(self._layers.items()):
            for column, which in enumerate(QKV):
                copies = {
                    "device tensor": device_L3[row][column],
                    "host float": getattr(module, f"_{which}_scale_float"),
                }
                if which != "q":
                    copies["host tensor"] = host_L2[row][column - 1]
                sent = scales.scale(layer, which)
                for copy, value in copies.items():
                    if value != sent:
                        wrong.append(f"layer {layer} {which}_scale: {copy} holds {value:g}, sent {sent:g}")
        if wrong:
            problems = listed(wrong, 12, "\n  ")
            raise RuntimeError(f"KV scales did not arrive in the engine ({len(wrong)} copies differ):\n  {problems}")

    def _tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors of scales on the device (q, k, v of each layer) and on the host (k and v of each)."""
        modules = self._layers.values()
        on_device = [getattr(module, f"_{which}_scale") for module in modules for which in QKV]
        on_host = [getattr(module, f"_{which}_scale_cpu") for module in modules for which in QKV[1:]]
        return on_device, on_host
