"""How the product of two quantized operands of a backward is computed: one function per backend, one signature.

    gemm(a, b)   a: codes [M, K] with 1x128 scales; b: codes [N, K] with 128x128 or 1x128 scales
                 ->  a @ b.T  [M, N]

- `fake_quant` multiplies the dequantized operands, on any device. With power-of-two scales they are exact in BF16, so
  the result is that of an FP8 GEMM up to the order of accumulation. With fp32 scales a BF16 GEMM rounds both operands
  again (about 0.3 % error of the output); on CPU operands are therefore FP32.
- `scaled_mm` hands the codes to cuBLASLt through `torch.nn.functional.scaled_mm`. Hopper (compute capability 9.0) with
  CUDA 12.9 or later. Results are BF16.

A backend that cannot run is refused by `require_backend`; none is ever replaced by another.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.quantization.formats import BLOCK


Gemm = Callable[[Float8Tensor, Float8Tensor], Tensor]
HOPPER = (9, 0)


def gemm_for(backend: str) -> Gemm:
    """The `gemm` of a backend. Results have at least BF16 precision."""
    return {"fake_quant": fake_quant_gemm, "scaled_mm": scaled_mm_gemm}[backend]


def fake_quant_gemm(a: Float8Tensor, b: Float8Tensor) -> Tensor:
    """`dequantize(a) @ dequantize(b).T` `[M, N]`, of operands in BF16, on CPU in FP32."""
    dtype = torch.float32 if a.device.type == "cpu" else torch.bfloat16
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
    if torch.version.cuda is None or _release(torch.version.cuda) < (12, 9):
        raise ValueError(
            f"{flag} with torch {torch.__version__} for CUDA {torch.version.cuda}: block scaling needs cuBLASLt of "
            f"CUDA 12.9 or later. Install such a build of torch. {remedy}"
        )


def _pad_codes(codes: Tensor, row_multiple: int) -> Tensor:
    return _pad(codes.view(torch.uint8), row_multiple, BLOCK).view(codes.dtype).contiguous()


def _pad(values: Tensor, row_multiple: int, column_multiple: int = 1, value: float = 0) -> Tensor:
    rows, columns = -values.shape[0] % row_multiple, -values.shape[1] % column_multiple
    return F.pad(values, (0, columns, 0, rows), value=value) if rows or columns else values


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
