"""Backward GEMMs of a trainer with one forward, decided once for all layers.

The engine computes the forward. With `fp8_backward="fp8"` the operands of both backward GEMMs are rounded to e4m3:
weights as their format says (`quantization.formats`), the others in groups of 128 along the dim that the GEMM
contracts.
Flag fp8_gemm_backend says how two quantized operands are multiplied:

- `fake_quant` multiplies the dequantized operands, on any device. With power-of-two scales they are exact in BF16, so
  the result is that of an FP8 GEMM up to the order of accumulation. With fp32 scales a BF16 GEMM rounds both operands
  again (about 0.3 % error of the output); on CPU operands are therefore FP32.
- `scaled_mm` hands the codes to cuBLASLt through `torch.nn.functional.scaled_mm`, on Hopper (compute capability 9.0)
  with CUDA 12.9 or later. Results are BF16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_activation
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.quantization.formats import BLOCK, BLOCKS, FormatSpec, ScaleFormat


# Gradients of a loss that is a mean over many tokens are far below any activation; the floor only has to keep the
# scale of an all-zero group a normal fp32 number.
GRADIENT_AMAX_FLOOR = 1e-30
HOPPER = (9, 0)


@dataclass(frozen=True)
class BackwardPrecision:
    """Values of flags, which `ForwardFlags` has checked, and what they mean for an operand."""

    precision: str = "bf16"  # flag fp8_backward
    format: FormatSpec = BLOCKS  # of the weights that the sync sends to the engine, as is their `scale_format`
    scale_format: ScaleFormat = "pow2"
    operand_scale_format: ScaleFormat = "pow2"  # of activations in the engine, and so of the backward's operands
    backend: str = "fake_quant"  # flag fp8_gemm_backend

    def quantize_weights(self, weights: Sequence[Tensor]) -> list[Float8Tensor]:
        """Q(W), `[N, K]` each, of one weight or of those that the engine fuses: the bytes that a sync sends."""
        # A weight that is not finite gives non-finite scales here; the sync refuses it by name
        return quantize_fused([one.detach().to(torch.bfloat16) for one in weights], self.format, self.scale_format)

    @torch.no_grad()
    def quantize_for_backward(self, values: Tensor) -> Float8Tensor:
        """Q of a backward operand, in groups of 128 along the last dim, as if zero-padded to whole groups."""
        return quantize_activation(values, self.operand_scale_format, amax_floor=GRADIENT_AMAX_FLOOR)

    def gemm(self, a: Float8Tensor, b: Float8Tensor) -> Tensor:
        """`a @ b.T` `[M, N]`, at least in BF16, of `a` with 1x128 scales and `b` with 128x128 or 1x128 scales."""
        return {"fake_quant": fake_quant_gemm, "scaled_mm": scaled_mm_gemm}[self.backend](a, b)


def gemm_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of a backward GEMM: BF16, but FP32 on CPU, which may emulate BF16 ten times slower."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def fake_quant_gemm(a: Float8Tensor, b: Float8Tensor) -> Tensor:
    dtype = gemm_dtype(a.device)
    return dequantize_weight(a, dtype) @ dequantize_weight(b, dtype).T


def scaled_mm_gemm(a: Float8Tensor, b: Float8Tensor) -> Tensor:
    """`a @ b.T` of the codes in cuBLASLt, BF16 `[M, N]`. Operands are zero-padded to the sizes that it wants.

    Layouts (cuBLASLt's, as torch 2.13 checks them): codes `a` row-major and `b.T` column-major; 1x128 scales
    `[rows, K/128]` with stride `[1, rows]`; 128x128 scales `[L4, N/128]` with stride `[1, L4]`, where L4 is K/128
    rounded up to a multiple of 4; rows of `a` a multiple of 4.
    """
    M, N, square = a.qdata.shape[0], b.qdata.shape[0], b.block_size[0] == BLOCK
    a_codes, b_codes = _pad_codes(a.qdata, 4), _pad_codes(b.qdata, BLOCK if square else 16)
    b_scale = _pad(b.scale, 1, 4, value=1.0) if square else _pad(b.scale, 16, value=1.0).t()
    product = F.scaled_mm(
        a_codes,
        b_codes.t(),
        scale_a=_pad(a.scale, 4, value=1.0).t().contiguous().t(),
        scale_recipe_a=ScalingType.BlockWise1x128,
        scale_b=b_scale.contiguous().t(),
        scale_recipe_b=ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128,
        output_dtype=torch.bfloat16,
    )
    return product[:M, :N]


def require_backend(backend: str, device_capability: tuple[int, int] | None) -> None:
    """Raise `ValueError` unless `backend` can run on a device of this CUDA compute capability (None: on CPU)."""
    flag, remedy = f"fp8_gemm_backend={backend!r}", "Set fp8_gemm_backend='fake_quant', which runs on any device."
    if backend == "fake_quant":
        return
    if device_capability != HOPPER:
        device = "CPU" if device_capability is None else "compute capability {}.{}".format(*device_capability)
        raise ValueError(
            f"{flag} on {device}: cuBLASLt has 1x128 by 128x128 block scaling on Hopper (9.0) only. {remedy}"
        )
    if torch.version.cuda is None or tuple(map(int, torch.version.cuda.split("."))) < (12, 9):
        raise ValueError(
            f"{flag} with torch {torch.__version__} for CUDA {torch.version.cuda}: block scaling needs cuBLASLt of "
            f"CUDA 12.9 or later. Install such a build of torch. {remedy}"
        )


def _pad_codes(codes: Tensor, row_multiple: int) -> Tensor:
    return _pad(codes.view(torch.uint8), row_multiple, BLOCK).view(codes.dtype).contiguous()


def _pad(values: Tensor, row_multiple: int, column_multiple: int = 1, value: float = 0) -> Tensor:
    rows, columns = -values.shape[0] % row_multiple, -values.shape[1] % column_multiple
    return F.pad(values, (0, columns, 0, rows), value=value) if rows or columns else values
