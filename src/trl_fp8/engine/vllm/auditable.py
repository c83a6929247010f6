"""Whether an engine's FP8 layers can be written by a sync and audited: what they hold after its start decides.

A sync writes e4m3 codes `[N, K]` and FP32 scales, one for each block, into the layer's own parameters, and nothing
converts them afterwards. So they have to be stored in this order, and the kernel has to read them anew in each call.
"""

from collections import defaultdict

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.formats import FORMATS, format_stored
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import HELD


# vLLM's kernels that read weight and scales anew in each call, and compute each row by itself. No tensor shows that a
# kernel has no copy of its own: it was read in vLLM's source
AUDITABLE_KERNELS = tuple(kernel for spec in FORMATS.values() for kernel in spec.kernels)


def require_auditable(model: nn.Module) -> None:
    """Raise `RuntimeError` unless each FP8 layer of a started engine holds weight and scales as a sync writes them."""
    found = defaultdict(list)
    for name, module in model.named_modules():
        if reason := _why_unverifiable(module):
            found[reason].append(name)
    if found:
        layers = (f"{why} ({len(names)} layers, first {names[0]})" for why, names in found.items())
        reasons = listed(layers, 4, "\n  ")
        raise RuntimeError(
            f"delivery to FP8 kernels that vLLM chose cannot be verified:\n  {reasons}\nRemove linear_backend and "
            "moe_backend from vllm_engine_kwargs, so that a kernel is chosen that can be, or name one: "
            "{'linear_backend': 'cutlass', 'deep_gemm' (Hopper) or 'triton'}, for experts {'moe_backend': 'triton'}."
        )


def why_linear_unverifiable(kernel: object, layer: nn.Module) -> str | None:
    """What about a linear kernel, or about what its layer holds, keeps a sync from writing to it; None if nothing."""
    name = type(kernel).__name__
    spec = format_stored(layer.weight_block_size)
    if spec is None:
        return f"{name} has blocks of {layer.weight_block_size}, which no format has"
    shape = layer.output_size_per_partition, layer.input_size_per_partition
    weight, scale = _meta(E4M3, *shape), _meta(torch.float32, *spec.scale_shape(shape))
    if spec.weight_block is None:  # vLLM keeps the weight transposed, and its scale without dims
        weight, scale = weight.t(), _meta(torch.float32)
    expected = {"weight": weight, f"weight{spec.scale_suffix}": scale}
    return _why_not_as_sent(name, layer, expected) or _why_not_known(name)


def _why_unverifiable(module: nn.Module) -> str | None:
    method = getattr(module, "quant_method", None)
    if isinstance(module, LinearBase) and getattr(method, "fp8_linear", None) is not None:
        return why_linear_unverifiable(method.fp8_linear, module)
    if isinstance(module, RoutedExperts) and isinstance(method, Fp8MoEMethod):
        name, spec, expected = str(method.fp8_backend), format_stored(method.weight_block_size), {}
        if reason := _why_not_known(name):  # some have other dimensions
            return reason
        for weight in (f"{fused}_weight" for fused in HELD):
            shape = getattr(module, weight).shape
            scale = _meta(torch.float32, *spec.scale_shape(shape))
            expected |= {weight: _meta(E4M3, *shape), f"{weight}{spec.scale_suffix}": scale}
        return _why_not_as_sent(name, module, expected)
    return None


def _why_not_known(name: str) -> str | None:
    if name in AUDITABLE_KERNELS:
        return None
    return f"{name} is not known to read weight and scales anew in each call, and to keep them in the order of a sync"


def _why_not_as_sent(name: str, layer: nn.Module, expected: dict[str, torch.Tensor]) -> str | None:
    for attribute, sent in expected.items():
        if (held := getattr(layer, attribute, None)) is None:
            return f"{name} keeps no {attribute}"
        if (held.dtype, held.shape, held.stride()) != (sent.dtype, sent.shape, sent.stride()):
            return f"{name} keeps {attribute} as {_words(held)}, sent is {_words(sent)}"
    return None


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _words(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
