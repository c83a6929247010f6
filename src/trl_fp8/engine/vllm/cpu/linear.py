"""The linear layers of a CPU engine, whose weights stay as they were loaded.

vLLM's own kernels for block-FP8 need AMX or leave activations unquantized. Those for unquantized layers pack weights
for the host's instruction set: a sync could not write there, nor an audit read back, and the same policy would sample
other tokens on another host. Here torch's own linear runs.

The reference kernels compute what the CUDA kernels compute, W8A8, and add the products in FP64: after rounding to BF16
their order does not show, so that neither rows in a batch, nor tensor parallel shards, nor the host's vector units
change a bit. The trainer's FP8 linears do the same on CPU (policy/flow/gemm.py); FP32 sums would part with depth.
"""

import torch
from torch import Tensor, nn
from vllm import _custom_ops as vllm_ops
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers import utils as vllm_layers
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import PlatformEnum, current_platform

from trl_fp8.upstream.patches import patch


class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """`y = dequantize(x) @ dequantize(w).T`, summed in fp64; vLLM's base class quantizes `x` in groups of 1x128."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return current_platform.is_cpu(), "the reference kernel runs on CPU only"

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """A: codes [T, K], B: codes [N, K], As: scales [T, K/128], Bs: scales [N/128, K/128] -> [T, N]."""
        rows, columns = self.weight_group_shape.row, self.weight_group_shape.col
        x = (A.float().unflatten(-1, (-1, columns)) * As.unsqueeze(-1)).flatten(-2)
        blocks = B.float().view(B.shape[0] // rows, rows, B.shape[1] // columns, columns)
        w = (blocks * Bs[:, None, :, None]).view(B.shape)
        return (x.double() @ w.double().T).float().to(self.config.out_dtype)


class ReferenceFp8TensorKernel(FP8ScaledMMLinearKernel):
    """`y = dequantize(x) @ dequantize(w) + bias`, summed in fp64 and rounded once."""

    is_supported = ReferenceFp8BlockKernel.is_supported

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # as before vLLM's CUTLASS kernel; one scale per batch, which it has on CPU, no trainer could follow
        self.quant_fp8 = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)

    @classmethod
    def can_implement(cls, c) -> tuple[bool, str | None]:
        return c.weight_quant_key.scale.group_shape.is_per_tensor(), "the reference kernel has one scale per weight"

    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape) -> Tensor:
        """A: codes [T, K], B: codes [K, N], As: scales [T, 1], Bs: scale [], bias: [N] or None -> [..., N]."""
        product = ((A.float() * As).double() @ (B.float() * Bs).double()).float()
        return (product if bias is None else product + bias.float()).to(out_dtype).view(output_shape)


def _scaled_fp8_quant(values: Tensor, scale: Tensor, *_unused, **_given) -> tuple[Tensor, Tensor]:
    return (values.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def register_cpu_kernel() -> None:
    """Put the reference kernels first in vLLM's tables for CPU; unquantized layers keep their weights. Idempotent."""
    blocks, tensors = linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS, linear_kernels._POSSIBLE_FP8_KERNELS
    if ReferenceFp8BlockKernel in blocks[PlatformEnum.CPU]:
        return
    for_blocks = [ReferenceFp8BlockKernel, *blocks[PlatformEnum.CPU]]
    patch(linear_kernels, "_POSSIBLE_FP8_BLOCK_KERNELS", blocks | {PlatformEnum.CPU: for_blocks})
    for_tensors = [ReferenceFp8TensorKernel, *tensors[PlatformEnum.CPU]]
    patch(linear_kernels, "_POSSIBLE_FP8_KERNELS", tensors | {PlatformEnum.CPU: for_tensors})
    patch(vllm_ops, "scaled_fp8_quant", _scaled_fp8_quant)

    def keep_as_loaded(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        else:  # a convolution, whose kernel reads packed weights where the CPU has BF16 instructions
            packing(layer, remove_weight)

    packing = patch(vllm_layers, "dispatch_cpu_unquantized_gemm", keep_as_loaded)
