"""`EngineNumerics` and attention layers of a started vLLM, read off the modules of its model."""

from collections import Counter

from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledDynamicMMLinearKernel
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from trl_fp8.quantization.formats import ACTIVATION_AMAX_FLOOR, FLOORED_SCALE_AMAX, ActivationScaling


# Rows below which vLLM's dynamic kernel runs FlashInfer's (swapAB), and from which it runs DeepGEMM's
SMALL_BATCH = 32


def attention_layers(model: nn.Module) -> dict[int, Attention | MLAAttention]:
    """Number of each decoder layer -> its attention; `RuntimeError` if names do not tell the layer."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, (Attention, MLAAttention)):
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            if len(numbers) != 1 or numbers[0] in layers:
                raise RuntimeError(f"cannot tell the decoder layer of the engine's attention module {name!r}.")
            layers[numbers[0]] = module
    return dict(sorted(layers.items()))


def quantizes_query(model: nn.Module) -> bool:
    """`EngineNumerics.query_rounded`: FlashAttention 3 and Triton do, MLA's and the CPU references do not."""
    layers = attention_layers(model).values()
    return any(module.query_quant is not None for module in layers if isinstance(module, Attention))


def fp8_kernels(model: nn.Module) -> Counter[str]:
    """`EngineNumerics.kernels`."""
    backends = [str(layer.quant_method.fp8_backend) for layer in fp8_experts(model)]
    return Counter([*(type(kernel).__name__ for kernel in _kernels(model)), *backends])


def fp8_experts(model: nn.Module) -> list[RoutedExperts]:
    """The engine's layers of experts that are FP8, in order."""
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    return [layer for layer in layers if isinstance(layer.quant_method, Fp8MoEMethod)]


def activation_scaling(model: nn.Module) -> ActivationScaling | None:
    """`EngineNumerics.linears`. `RuntimeError` if they differ: no trainer could follow them with one format."""
    found = {kernel_scaling(kernel) for kernel in _kernels(model)}
    if len(found) > 1:
        raise RuntimeError(
            f"the engine's FP8 linears quantize activations in {len(found)} ways: {sorted(found)}. Pin one kernel: "
            "vllm_engine_kwargs={'linear_backend': 'cutlass'}."
        )
    return found.pop() if found else None


def kernel_scaling(kernel: object, rows: int = SMALL_BATCH) -> ActivationScaling:
    """Return how a linear kernel of vLLM's quantizes a batch of `rows` tokens."""
    if isinstance(kernel, Fp8BlockScaledDynamicMMLinearKernel):
        kernel = kernel.base if rows < SMALL_BATCH else kernel.fallback
    quant = kernel.quant_fp8
    native = quant._forward_method in (quant.forward_native, quant.forward_cpu)
    if quant.is_group_quant:
        floor = FLOORED_SCALE_AMAX if native else ACTIVATION_AMAX_FLOOR
        return ActivationScaling("pow2" if quant.use_ue8m0 else "fp32", floor)
    scope = "token" if quant.group_shape.is_per_token() else "tensor"
    # always fp32 scales that are floored; the torch path multiplies by their reciprocal
    return ActivationScaling("fp32", FLOORED_SCALE_AMAX, scope, reciprocal=native)


def _kernels(model: nn.Module) -> list:
    methods = [module.quant_method for module in model.modules() if isinstance(module, LinearBase)]
    return [method.fp8_linear for method in methods if getattr(method, "fp8_linear", None) is not None]
