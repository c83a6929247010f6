"""The FP8 layers and attention layers of a started vLLM: how they compute, and whether a sync can write them.

A sync writes e4m3 codes `[N, K]` and scales, one for each block, into a layer's own parameters, and nothing converts
them afterwards. So a layer has to store codes and scales in the order in which a sync sends them, and its kernel has
to read them anew in each call. `require_auditable` checks both after the start of an engine. Some kernels read scales
in another order (tiles). For these a sync writes the scales to an additional parameter, and then rearranges them into
the layer's own, as vLLM does after a load.
"""

from collections import Counter, defaultdict

import torch
from torch import nn
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledDynamicMMLinearKernel
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale

from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.codec.weights import scale_dtype
from trl_fp8.quantization.formats import (
    ACTIVATION_AMAX_FLOOR,
    E8M0_AMAX_FLOOR,
    FLOORED_SCALE_AMAX,
    FORMATS,
    ActivationScaling,
    FormatSpec,
    format_stored,
)
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import HELD


# With fewer rows vLLM's `Fp8BlockScaledDynamicMMLinearKernel` runs FlashInfer's swapAB, otherwise DeepGEMM
SMALL_BATCH = 32
# vLLM's kernels that read weight and scales anew in each call, and compute each row by itself. The list comes from
# reading vLLM's source, because no tensor shows whether a kernel keeps a copy of its own
AUDITABLE_KERNELS = tuple(kernel for spec in FORMATS.values() for kernel in spec.kernels)
# Kernels that read scales in tiles of 128 rows and 4 columns. vLLM rearranges the scales after a load
TILED = ("FlashInferCutlassMxfp8LinearKernel",)
# Name of the additional parameter of a layer with such a kernel. It holds the scales in the order of a sync
UNTILED_SCALE = "untiled_scale"


def attention_layers(model: nn.Module) -> dict[int, Attention | MLAAttention]:
    """Return layer number -> attention module. The number is the only one in the module's name.

    `RuntimeError` if a name has no number or several, or if two modules have the same number.
    """
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, (Attention, MLAAttention)):
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            if len(numbers) != 1 or numbers[0] in layers:
                raise RuntimeError(f"cannot tell the decoder layer of the engine's attention module {name!r}.")
            layers[numbers[0]] = module
    return dict(sorted(layers.items()))


def quantizes_query(model: nn.Module) -> bool:
    """Return whether attention rounds q to e4m3: FlashAttention 3 and Triton do, MLA and the CPU references do not."""
    layers = attention_layers(model).values()
    return any(module.query_quant is not None for module in layers if isinstance(module, Attention))


def fp8_kernels(model: nn.Module) -> Counter[str]:
    """Return kernel name -> number of layers that use it, for FP8 kernels (`EngineNumerics.kernels`)."""
    backends = [str(layer.quant_method.fp8_backend) for layer in fp8_experts(model)]
    return Counter([*(type(kernel).__name__ for kernel in _kernels(model)), *backends])


def fp8_experts(model: nn.Module) -> list[RoutedExperts]:
    """Return the engine's layers of experts that are FP8, in order."""
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    return [layer for layer in layers if isinstance(layer.quant_method, Fp8MoEMethod)]


def keep_untiled_scales(model: nn.Module) -> None:
    """Call `keep_untiled_scale` for each FP8 linear of an engine's model."""
    for module in model.modules():
        if (kernel := fp8_kernel(module)) is not None:
            keep_untiled_scale(kernel, module)


def keep_untiled_scale(kernel: object, layer: nn.Module) -> None:
    """Add a parameter `UNTILED_SCALE`, into which a sync can write, to a layer whose kernel reads tiled scales."""
    if type(kernel).__name__ not in TILED or hasattr(layer, UNTILED_SCALE):
        return
    spec, tiled = format_stored(layer.weight_block_size), layer.weight_scale
    shape = spec.scale_shape((layer.output_size_per_partition, layer.input_size_per_partition))
    scale = torch.zeros(shape, dtype=tiled.dtype, device=tiled.device)
    layer.register_parameter(UNTILED_SCALE, nn.Parameter(scale, requires_grad=False))


def tiled_scale(layer: nn.Module) -> torch.Tensor:
    """Return the scales in a layer's `UNTILED_SCALE`, rearranged into the tiles that its kernel reads."""
    rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
    return swizzle_mxfp8_scale(getattr(layer, UNTILED_SCALE).detach(), M=rows, K=columns)


def activation_scaling(model: nn.Module) -> ActivationScaling | None:
    """Return how the FP8 linears quantize activations; None if no linear is FP8 (`EngineNumerics.linears`).

    `RuntimeError` if linears do it in different ways, because a trainer can compute in only one way.
    """
    scalings = {kernel_scaling(kernel) for kernel in _kernels(model)}
    if len(scalings) > 1:
        raise RuntimeError(
            f"the engine's FP8 linears quantize activations in {len(scalings)} ways: {sorted(scalings)}. Pin one "
            "kernel: vllm_engine_kwargs={'linear_backend': 'cutlass'}."
        )
    return scalings.pop() if scalings else None


def kernel_scaling(kernel: object, rows: int = SMALL_BATCH) -> ActivationScaling:
    """Return how vLLM's linear kernel quantizes the activations of a batch of `rows` tokens."""
    if isinstance(kernel, Mxfp8LinearKernel):
        return ActivationScaling("pow2", E8M0_AMAX_FLOOR)
    if isinstance(kernel, Fp8BlockScaledDynamicMMLinearKernel):
        flashinfer, deepgemm = kernel.base, kernel.fallback
        kernel = flashinfer if rows < SMALL_BATCH else deepgemm
    quant = kernel.quant_fp8
    # vLLM quantizes activations by a kernel of its own or by torch operations, which it may have compiled: a wrapper
    # of torch.compile equals no method of `quant`
    by_torch = quant._forward_method not in (quant.forward_cuda, quant.forward_hip)
    if quant.is_group_quant:
        # The torch operations clamp the scale. The kernel clamps amax, to a smaller value
        floor = FLOORED_SCALE_AMAX if by_torch else ACTIVATION_AMAX_FLOOR
        return ActivationScaling("pow2" if quant.use_ue8m0 else "fp32", floor)
    # One FP32 scale per token or tensor, clamped in both ways. The torch operations multiply by its reciprocal
    scope = "token" if quant.group_shape.is_per_token() else "tensor"
    return ActivationScaling("fp32", FLOORED_SCALE_AMAX, scope, reciprocal=by_torch)


def _kernels(model: nn.Module) -> list:
    kernels = map(fp8_kernel, model.modules())
    return [kernel for kernel in kernels if kernel is not None]


def fp8_kernel(module: nn.Module) -> object | None:
    """Return the kernel of a module if it is one of vLLM's FP8 linears; None if not."""
    if not isinstance(module, LinearBase):
        return None
    method = module.quant_method
    mxfp8_kernel = getattr(method, "kernel", None)  # vLLM's methods for other formats may have a `kernel`, too
    if isinstance(mxfp8_kernel, Mxfp8LinearKernel):
        return mxfp8_kernel
    return getattr(method, "fp8_linear", None)


def linear_format(module: nn.Module) -> FormatSpec | None:
    """Return the format of one of vLLM's FP8 linears; None for other modules, and for linears in an unknown format."""
    return None if fp8_kernel(module) is None else format_stored(module.weight_block_size)


def require_auditable(model: nn.Module) -> None:
    """Raise `RuntimeError` unless a sync can write weight and scales of each FP8 layer of a started engine."""
    names_by_reason = defaultdict(list)
    for name, module in model.named_modules():
        reason = _why_unverifiable(module)
        if reason:
            names_by_reason[reason].append(name)
    if names_by_reason:
        lines = (f"{reason} ({len(names)} layers, first {names[0]})" for reason, names in names_by_reason.items())
        reasons = listed(lines, 4, "\n  ")
        formats = [linear_format(module) for module in model.modules()]
        pinned = {spec.linear_backend for spec in formats if spec is not None and spec.linear_backend is not None}
        backends = ", ".join(map(repr, pinned)) or "'cutlass', 'deep_gemm' (Hopper) or 'triton'"
        raise RuntimeError(
            f"delivery to FP8 kernels that vLLM chose cannot be verified:\n  {reasons}\nRemove linear_backend and "
            "moe_backend from vllm_engine_kwargs to have a kernel chosen that can be verified, or name one: "
            f"{{'linear_backend': {backends}}}, for experts {{'moe_backend': 'triton'}}."
        )


def why_linear_unverifiable(kernel: object, layer: nn.Module) -> str | None:
    """Return why a sync cannot write weight and scales of a linear with this kernel; None if it can."""
    name = type(kernel).__name__
    spec = format_stored(layer.weight_block_size)
    if spec is None:
        return f"{name} has blocks of {layer.weight_block_size}, which no format has"
    shape = layer.output_size_per_partition, layer.input_size_per_partition
    weight, scale = _meta(E4M3, *shape), _meta(scale_dtype(spec), *spec.held_scale_shape(shape))
    scale_name = UNTILED_SCALE if name in TILED else spec.scale_attribute
    expected = {"weight": weight.t() if spec.weight_transposed else weight, scale_name: scale}
    return _why_not_as_sent(name, layer, expected) or _why_not_known(name)


def _why_unverifiable(module: nn.Module) -> str | None:
    """Return why a sync cannot write weight and scales of a module; None if it can, or if the module is not FP8."""
    method = getattr(module, "quant_method", None)
    if (kernel := fp8_kernel(module)) is not None:
        return why_linear_unverifiable(kernel, module)
    if isinstance(module, RoutedExperts) and isinstance(method, Fp8MoEMethod):
        name = str(method.fp8_backend)
        if reason := _why_not_known(name):  # checked first, because unknown kernels may hold weights in other shapes
            return reason
        spec = format_stored(method.weight_block_size)
        expected = {}
        for fused in HELD:  # vLLM fuses a layer's experts into two weights, each with scales
            weight = f"{fused}_weight"
            shape = getattr(module, weight).shape
            expected[weight] = _meta(E4M3, *shape)
            expected[f"{weight}{spec.scale_suffix}"] = _meta(scale_dtype(spec), *spec.scale_shape(shape))
        return _why_not_as_sent(name, module, expected)
    return None


def _why_not_known(name: str) -> str | None:
    if name in AUDITABLE_KERNELS:
        return None
    return f"{name} is not known to read weight and scales anew in each call, and to keep them in the order of a sync"


def _why_not_as_sent(name: str, layer: nn.Module, expected: dict[str, torch.Tensor]) -> str | None:
    for attribute, sent in expected.items():
        tensor = getattr(layer, attribute, None)
        if tensor is None:
            return f"{name} keeps no {attribute}"
        if (tensor.dtype, tensor.shape, tensor.stride()) != (sent.dtype, sent.shape, sent.stride()):
            return f"{name} keeps {attribute} as {_form(tensor)}, a sync sends {_form(sent)}"
    return None


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
