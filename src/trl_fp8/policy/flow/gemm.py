"""How the product of two quantized operands is computed: one function per backend, one signature.

    gemm(a, b, dtype)   a: codes [M, K] with 1x128 scales; b: codes [N, K] with 128x128 or 1x128 scales
                        ->  a @ b.T  [M, N]

- `fake_quant` multiplies the dequantized operands, on any device. With power-of-two scales they are exact in BF16, so
  the result is that of an FP8 GEMM up to the order of accumulation. With fp32 scales a BF16 GEMM rounds both operands
  again (about 0.3 % error of the output, half of its BF16 values move by a step); on CPU the operands are therefore
  FP32 and their sums FP64, as in the engine's reference kernel, and on Hopper `scaled_mm` is the exact backend.
- `scaled_mm` hands the codes to cuBLASLt through `torch.nn.functional.scaled_mm`: forward, and with fp8_backward="fp8"
  both gradients. Hopper (compute capability 9.0) with CUDA 12.9 or later. Results are BF16.
- `torchao` is torchao's prototype block-FP8 linear with its own quantizers and backward: `torchao_linear`, no `gemm`.

A backend that cannot run is refused by `require_backend`; none is ever replaced by another.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.blockwise import dequantize_weight
from trl_fp8.quantization.formats.blocks import BLOCK

from .flow import BACKENDS


Gemm = Callable[[Float8Tensor, Float8Tensor, torch.dtype], Tensor]
HOPPER = (9, 0)


def gemm_for(backend: str) -> Gemm:
    """The `gemm` of a backend, for `dtype` of the trainer's computation. Results have at least BF16 precision."""
    return {"fake_quant": fake_quant_gemm, "scaled_mm": scaled_mm_gemm}[backend]


def fake_quant_gemm(a: Float8Tensor, b: Float8Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize(a) @ dequantize(b).T` of operands in `operand_dtype(dtype)`, on CPU summed in FP64; `[M, N]`."""
    dtype = operand_dtype(dtype, a.qdata.device)
    a, b = dequantize_weight(a, dtype), dequantize_weight(b, dtype)
    return (a.double() @ b.double().T).to(dtype) if a.device.type == "cpu" else a @ b.T


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What dequantized operands are stored in: FP32 on CPU; BF16 for FP16, whose range ends at 65504."""
    if device.type == "cpu" and dtype.itemsize == 2:
        return torch.float32
    return torch.bfloat16 if dtype == torch.float16 else dtype


def scaled_mm_gemm(a: Float8Tensor, b: Float8Tensor, dtype: torch.dtype) -> Tensor:
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


def torchao_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` by torchao's `fp8_blockwise_mm`, differentiable: x `[T, K]`, weight `[N, K]`, BF16 `[T, N]`.

    Tokens are padded with zeros to a multiple of 128, which its backward asserts; zero rows add nothing to a gradient.
    """
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    tokens = x.shape[0]
    x = F.pad(x.to(torch.bfloat16), (0, 0, 0, -tokens % BLOCK))
    return fp8_blockwise_mm.apply(x, weight.to(torch.bfloat16), BLOCK, torch.bfloat16, False)[:tokens]


def require_backend(backend: str, device_capability: tuple[int, int] | None) -> None:
    """Raise `ValueError` unless `backend` can run on a device of this CUDA compute capability (None: on CPU)."""
    flag, remedy = f"fp8_gemm_backend={backend!r}", "Set fp8_gemm_backend='fake_quant', which runs on any device."
    if backend not in BACKENDS:
        raise ValueError(f"{flag} is not a GEMM backend. Use one of {list(BACKENDS)}.")
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
    if backend == "torchao" and not (3,) <= _release(_installed("triton")) < (3, 9):
        raise ValueError(
            f"{flag} with triton {_installed('triton')}: torchao 0.18's quantizers do not compile with triton 3.9 or "
            f"later. Install the triton that torch pins. {remedy}"
        )


def _pad_codes(codes: Tensor, row_multiple: int) -> Tensor:
    return _pad(codes.view(torch.uint8), row_multiple, BLOCK).view(codes.dtype).contiguous()


def _pad(values: Tensor, row_multiple: int, column_multiple: int = 1, value: float = 0) -> Tensor:
    rows, columns = -values.shape[0] % row_multiple, -values.shape[1] % column_multiple
    return F.pad(values, (0, columns, 0, rows), value=value) if rows or columns else values


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "0.0 (not installed)"
