"""The engine's KV cache scales: where vLLM keeps them, and proof that they are the ones that were sent.

vLLM keeps each scale three times: a device tensor that CUDA kernels read, a Python float that the CPU kernel and
FlashInfer read, and for k and v a tensor on the host. A scale that reaches only some of them is the bug that others
had for months, so all of them are read back and compared.
"""

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention

from ..numerics.kv_scales import QKV, KVScales


def attention_layers(model: nn.Module) -> dict[int, Attention]:
    """The engine's attention modules by decoder layer number.

    Raises:
        RuntimeError: Two of them have the same layer number, or a name holds none.
    """
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            numbers = [part for part in name.split(".") if part.isdigit()]
            if len(numbers) != 1 or int(numbers[0]) in layers:
                raise RuntimeError(f"cannot tell the decoder layer of the engine's attention module {name!r}.")
            layers[int(numbers[0])] = module
    return dict(sorted(layers.items()))


def verify_kv_scales(model: nn.Module, expected: KVScales) -> None:
    """Compare every copy of every scale in the engine with `expected`. Waits for the device once.

    Raises:
        RuntimeError: The message lists each copy that differs, by layer and name.
    """
    layers = attention_layers(model)
    if list(layers) != list(range(len(expected))):
        raise RuntimeError(
            f"KV scales were calibrated for {len(expected)} layers, but the engine's attention layers are "
            f"{list(layers)}: scales cannot be assigned."
        )
    on_device = torch.stack([getattr(module, f"_{which}_scale") for module in layers.values() for which in QKV])
    held = on_device.view(-1, len(QKV)).tolist()
    wrong = []
    for layer, module in layers.items():
        for column, which in enumerate(QKV):
            sent = expected.scale(layer, which)
            copies = {"device tensor": held[layer][column], "host float": getattr(module, f"_{which}_scale_float")}
            if which != "q":  # vLLM keeps no host tensor of q's scale
                copies["host tensor"] = getattr(module, f"_{which}_scale_cpu").item()
            wrong += [
                f"layer {layer} {which}_scale: {copy} holds {value:g}, sent {sent:g}"
                for copy, value in copies.items()
                if value != sent
            ]
    if wrong:
        raise RuntimeError(
            f"KV cache scales did not arrive in the engine ({len(wrong)} copies differ):\n  " + "\n  ".join(wrong[:12])
        )
