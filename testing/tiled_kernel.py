"""vLLM's MXFP8 kernel for Blackwell on a CPU. Only its GEMM is missing, for which the reference stands in."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from torch import Tensor, nn
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mxfp8.flashinfer import FlashInferCutlassMxfp8LinearKernel
from vllm.platforms import PlatformEnum

from trl_fp8.engine.vllm import numerics
from trl_fp8.engine.vllm.cpu.reference_linear import ReferenceMxfp8Kernel, register_cpu_kernel


class TiledKernel(FlashInferCutlassMxfp8LinearKernel):
    """vLLM's kernel, which rearranges scales after a load. It reads them in tiles of 128 rows and 4 columns only."""

    is_supported = ReferenceMxfp8Kernel.is_supported

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, columns = layer.weight.shape
        tiles = layer.weight_scale.view(-(-rows // 128), -1, 32, 4, 4).transpose(1, 3)
        scale = tiles.reshape(-(-rows // 128) * 128, -1)[:rows, : columns // 32]
        untiled = SimpleNamespace(weight=layer.weight, weight_scale=scale)
        return ReferenceMxfp8Kernel.apply_weights(self, untiled, x, bias)


@contextmanager
def tiled_kernel() -> Iterator[None]:
    """Run the MXFP8 linears of engines that start inside the block on `TiledKernel`."""
    register_cpu_kernel()
    name = (TiledKernel.__name__,)
    with (
        patch.dict(kernels._POSSIBLE_MXFP8_KERNELS, {PlatformEnum.CPU: [TiledKernel]}),
        patch.multiple(numerics, TILED=name, AUDITABLE_KERNELS=name),
    ):
        yield


def without_untiled(model: nn.Module) -> list[Tensor]:
    """Return parameters and buffers of an engine's model as vLLM itself makes them: scales in tiles only."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [tensor for name, tensor in named if not name.endswith(f".{numerics.UNTILED_SCALE}")]
