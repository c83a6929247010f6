"""Linear layers of a CPU engine: a row's bits do not depend on the batch, and weights stay as they were loaded.

`register_cpu_kernel` makes vLLM call `linear` for unquantized layers, and a kernel of this module for each FP8 format:
`ReferenceFp8BlockKernel`, `ReferenceFp8TensorKernel` and `ReferenceMxfp8Kernel`.

vLLM's own kernels for block-FP8 need AMX or leave activations unquantized. Its kernels for unquantized layers pack
weights for the host's instruction set, so a sync could not write them and an audit could not read them back. And
these kernels, like torch's, add in FP32 in an order that depends on the number of rows, on shards and on the host.

Here every product is added in FP64. Two orders of one sum then differ by about 2^-53 of the sum's largest terms, and
BF16 keeps 2^-8. So the order shows after rounding only if the sum is within 2^-53 of a tie: in about one sum in 2^40.
Products of BF16 numbers are exact in FP64. A sum of 4096 such products is exact, too, if their exponents are at most
25 apart.

Weights are converted in blocks that stay in a core's cache. So a decode step still reads the BF16 weights from memory
only once, and a vocabulary of 150,000 needs no FP64 copy.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm import _custom_ops as vllm_ops
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers import utils as vllm_layers
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import MXFP8_BLOCK_SIZE, mxfp8_e4m3_quantize
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import PlatformEnum, current_platform

from trl_fp8.quantization.codec.e4m3 import E8M0, e4m3_values
from trl_fp8.upstream.patches import patch


BLOCK_BYTES = 2 * 2**20  # size of a block of FP64 weights; larger blocks do not fit into a core's L2 cache


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x @ weight.T + bias` of x `[..., K]`, weight `[N, K]` and bias `[N]`.

    The sum is rounded once, to `dtype`, by default to the dtype of x.
    """
    rows = _rows_per_block(weight)
    # Slices, because a compiler cannot trace `split` of vLLM's parameters
    blocks = [weight[start : start + rows] for start in range(0, len(weight), rows)]
    return _sum_fp64(x, blocks, bias, dtype or x.dtype)


def _sum_fp64(x: Tensor, weights: Iterable[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what `linear` returns, for a weight `[N, K]` that is divided into blocks of rows, each `[n, K]`."""
    wide = x.double()
    outputs = []  # for each block its columns of the output
    start = 0
    for block in weights:
        stop = start + len(block)
        output = wide @ block.double().T
        if bias is not None:
            output.add_(bias[start:stop])
        outputs.append(output.to(dtype))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _rows_per_block(weight_NK: Tensor) -> int:
    return max(1, BLOCK_BYTES // (8 * weight_NK.shape[1]))


class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """`y = dequantize(x) @ dequantize(w).T`, summed in fp64; vLLM's base class quantizes `x` in groups of 1x128."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return current_platform.is_cpu(), "the reference kernel runs on CPU only"

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """Multiply A: codes [T, K], B: codes [N, K], As: scales [T, K/128], Bs: scales [N/128, K/128] -> [T, N]."""
        rows, columns = self.weight_group_shape.row, self.weight_group_shape.col  # of the weights that share a scale
        x = e4m3_values(A.unflatten(-1, (-1, columns)), As.unsqueeze(-1)).flatten(-2)
        scale_rows = max(1, _rows_per_block(B) // rows)  # rows of scales for a block of weights
        blocks = (
            _block_values(codes, scales, rows, columns)
            for codes, scales in zip(B.split(scale_rows * rows), Bs.split(scale_rows), strict=True)
        )
        return _sum_fp64(x, blocks, None, self.config.out_dtype)


def _block_values(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return, in FP32, the numbers that codes [n, K] stand for, with one scale per `rows` x `columns` codes."""
    by_scale = codes.view(len(scales), rows, -1, columns)
    return e4m3_values(by_scale, scales[:, None, :, None]).view(codes.shape)


class ReferenceFp8TensorKernel(FP8ScaledMMLinearKernel):
    """`y = dequantize(x) @ dequantize(w) + bias`, summed in fp64 and rounded once."""

    is_supported = ReferenceFp8BlockKernel.is_supported

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # One scale per token, as for vLLM's CUTLASS kernel on a GPU. vLLM's default on CPU is one scale per batch,
        # which a trainer cannot reproduce with other batches
        self.quant_fp8 = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)

    @classmethod
    def can_implement(cls, c) -> tuple[bool, str | None]:
        return c.weight_quant_key.scale.group_shape.is_per_tensor(), "the reference kernel has one scale per weight"

    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape) -> Tensor:
        """Multiply A: codes [T, K], B: codes [K, N], As: scales [T, 1], Bs: scale [], and add bias [N] -> [..., N]."""
        weight_NK = B.t()
        blocks = (e4m3_values(codes, Bs) for codes in weight_NK.split(_rows_per_block(weight_NK)))
        return _sum_fp64(e4m3_values(A, As), blocks, bias, out_dtype).view(output_shape)


class ReferenceMxfp8Kernel(Mxfp8LinearKernel):
    """`y = dequantize(x) @ dequantize(w).T + bias`, summed in fp64 and rounded once.

    `x` is quantized as for vLLM's kernels on Blackwell. vLLM's own emulation leaves `x` in BF16 and multiplies in
    BF16.
    """

    is_supported = ReferenceFp8BlockKernel.is_supported

    @classmethod
    def can_implement(cls, c) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave codes [N, K] and scales [N, K/32] as they were loaded."""

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's output `[..., N]` for x `[..., K]`."""
        x_codes, x_scales = mxfp8_e4m3_quantize(x.reshape(-1, x.shape[-1]).contiguous())
        rows = _rows_per_block(layer.weight)
        blocks = (
            _mx_values(codes, scales)
            for codes, scales in zip(layer.weight.split(rows), layer.weight_scale.split(rows), strict=True)
        )
        product = _sum_fp64(_mx_values(x_codes, x_scales), blocks, bias, x.dtype)
        return product.view(*x.shape[:-1], -1)


def _mx_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return, in FP32, the numbers that codes [R, K] stand for. `scales` are exponents [R, K/32], one for 32 codes."""
    groups = codes.unflatten(-1, (-1, MXFP8_BLOCK_SIZE))  # [R, K/32, 32]
    return e4m3_values(groups, scales.view(E8M0).float().unsqueeze(-1)).flatten(-2)


def _scaled_fp8_quant(values: Tensor, scale: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
    """Quantize with `scale`. Replaces vLLM's function, which has no code for CPU. Ignores further arguments."""
    return (values.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def register_cpu_kernel() -> None:
    """Put the reference kernels first in vLLM's tables for CPU; unquantized layers call `linear`. Idempotent."""
    # vLLM's tables: platform -> kernels, for weights with a scale per block, and with a scale per tensor
    block_kernels = linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS
    tensor_kernels = linear_kernels._POSSIBLE_FP8_KERNELS
    if ReferenceFp8BlockKernel in block_kernels[PlatformEnum.CPU]:
        return
    for_blocks = [ReferenceFp8BlockKernel, *block_kernels[PlatformEnum.CPU]]
    patch(linear_kernels, "_POSSIBLE_FP8_BLOCK_KERNELS", block_kernels | {PlatformEnum.CPU: for_blocks})
    for_tensors = [ReferenceFp8TensorKernel, *tensor_kernels[PlatformEnum.CPU]]
    patch(linear_kernels, "_POSSIBLE_FP8_KERNELS", tensor_kernels | {PlatformEnum.CPU: for_tensors})
    linear_kernels.register_linear_kernel(ReferenceMxfp8Kernel, PlatformEnum.CPU, "mxfp8")
    patch(vllm_ops, "scaled_fp8_quant", _scaled_fp8_quant)

    def keep_as_loaded(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:  # any other layer is a convolution, which delta_net.py computes
            layer.cpu_linear = linear

    patch(vllm_layers, "dispatch_cpu_unquantized_gemm", keep_as_loaded)
