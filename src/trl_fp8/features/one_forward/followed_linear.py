"""The trained model's linear layers, computed by the engine, and the GEMMs of their backward.

    forward    y = engine(x)                 its kernel on its tensors; q, k, v and gate, up in one call each
    backward   "bf16"  dX = dY @ W, dW = dY.T @ X                   straight through, unquantized operands
               "fp8"   dX = Q(dY) @ Q(W), dW = Q(dY.T) @ Q(X.T).T   Jet-RL, arXiv 2601.14243, of FP8 layers

Straight through, the backward keeps x in BF16; in FP8 it keeps the codes of x along its tokens, 1 byte an element. It
never keeps a copy of the weight. Under LoRA the engine holds the sum of base and adapters, or the adapters beside a
base that it shares with the policy. In the second case W is that base, dequantized for the backward.

With `fp8_backward="fp8"` the operands of both GEMMs are rounded to e4m3: weights as their format says
(`quantization.formats`), the others in groups along the dim that the GEMM contracts. Flag fp8_gemm_backend says
how two quantized operands are multiplied:

- `fake_quant` multiplies the dequantized operands, on any device. With power-of-two scales they are exact in BF16, so
  the result is that of an FP8 GEMM up to the order of accumulation. With fp32 scales a BF16 GEMM rounds both operands
  again (about 0.3 % error of the output); on CPU operands are therefore FP32.
- `scaled_mm` hands the codes to cuBLASLt through `torch.nn.functional.scaled_mm`, on Hopper (compute capability 9.0)
  with CUDA 12.9 or later. Results are BF16.

Shape letters: T tokens (all leading dims), N out-features, K in-features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType
from torchao.quantization import Float8Tensor

from trl_fp8.engine.kernels import Linear
from trl_fp8.policy.swapped import HoldsCodes, with_value
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_activation
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.quantization.formats import BLOCK, BLOCKS, FormatSpec, ScaleFormat


# Gradients of a loss that is a mean over many tokens are far below any activation; the floor only has to keep the
# scale of an all-zero group a normal fp32 number.
GRADIENT_AMAX_FLOOR = 1e-30
HOPPER = (9, 0)


@dataclass(frozen=True)
class BackwardPrecision:
    """Precision of the backward, by flags that `ForwardFlags` has checked."""

    precision: str = "bf16"  # flag fp8_backward
    format: FormatSpec = BLOCKS  # of the weights that the sync sends to the engine
    scale_format: ScaleFormat = "pow2"  # likewise
    operand_scale_format: ScaleFormat = "pow2"  # of activations in the engine, and so of the backward's operands
    backend: str = "fake_quant"  # flag fp8_gemm_backend

    def quantize_weights(self, weights: Sequence[Tensor]) -> list[Float8Tensor]:
        """Return Q(W) `[N, K]` of one weight, or of each that the engine fuses: the bytes that a sync sends."""
        # A weight that is not finite gives non-finite scales here; the sync refuses it by name
        return quantize_fused([weight.detach().bfloat16() for weight in weights], self.format, self.scale_format)

    @torch.no_grad()
    def quantize_for_backward(self, values: Tensor) -> Float8Tensor:
        """Return Q of a backward operand, in groups along the last dim, as if zero-padded to whole groups."""
        options = {"group": self.format.gradient_group, "amax_floor": GRADIENT_AMAX_FLOOR}
        return quantize_activation(values, self.operand_scale_format, **options)

    def gemm(self, a: Float8Tensor, b: Float8Tensor) -> Tensor:
        """Return `a @ b.T` `[M, N]`, at least in BF16; `a` has 1x128 scales, `b` 128x128 or 1x128 scales."""
        if self.backend == "scaled_mm":
            return scaled_mm_gemm(a, b)
        dtype = gemm_dtype(a.device)
        return dequantize_weight(a, dtype) @ dequantize_weight(b, dtype).T


class FusedCall:
    """One call of the engine for the policy's layers that it fused, which read the same tensor one after another."""

    def __init__(self, call: Callable[[Tensor], Tensor], readers: int):
        self._call, self._readers = call, readers
        self._output: Tensor | None = None
        self._input: ref[Tensor] | None = None
        self._version = 0
        self._remaining = 0  # readers of `_output`

    def __call__(self, x: Tensor) -> Tensor:
        """Return `call(x)`, or the output of the last call if its input was this very tensor, unchanged since."""
        if x.is_inference():  # it has no version, which would show a change
            return self._call(x)
        if self._output is None or self._input() is not x or self._version != x._version:
            self._output, self._input, self._version = self._call(x), ref(x), x._version
            self._remaining = self._readers
        output = self._output
        self._remaining -= 1
        if not self._remaining:  # free the output with its last reader
            self._output = self._input = None
        return output


class FollowedLinear(nn.Linear):
    """Mixed into a linear layer by `OneForward`: its values are the engine's."""

    name: str  # checkpoint name
    is_fp8: bool
    adapted: bool  # the engine holds the sum of this weight and adapters
    engine: Linear
    columns: slice  # of the engine's output
    fused: FusedCall
    along_tokens: FusedCall  # Q(X.T)

    def forward(self, input: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(input)
        fp8_layer = self if self.is_fp8 and self.one_forward.backward.precision == "fp8" else None
        weight = self.codes if isinstance(self, HoldsCodes) else self.weight
        return StraightThrough.apply(self.value, input, weight, self.bias, fp8_layer)

    def value(self, input: Tensor) -> Tensor:
        """Return the engine's output, BF16 `[..., N]` of `[..., K]`, adapters included."""
        y = self.fused(input)[:, self.columns]
        return y.view(*input.shape[:-1], y.shape[-1])

    def lasting_codes(self) -> Float8Tensor | None:
        """Return codes of the weight that exist anyway, in the engine or in this layer; None if there are none."""
        if isinstance(self, HoldsCodes):
            return self.codes
        if self.adapted:  # the engine's are codes of the sum
            return None
        return self.engine.codes(self.name)


class FollowedAdapter:
    """Mixed into PEFT's wrapper of a followed linear: one value of the engine, gradients of base and adapters apart.

        forward    y = engine(x)                          with Q(W + s B A), or with Q(W) and A, s B beside it
        backward   that of x W.T + s drop(x) A.T B.T      PEFT's own, so that A and B are trained as without an engine

    Dropout has no part in the forward. The gradient is that of a sum, which needs no value of the base alone: the
    engine never computes that.
    """

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        base = self.base_layer
        if not base.one_forward.on:
            return super().forward(x, *args, **kwargs)
        value = base.value(x)
        return with_value(super().forward(x, *args, **kwargs), value)


class StraightThrough(torch.autograd.Function):
    """`value(x)` with the gradients of `x @ weight.T + bias`. `fp8_layer` quantizes the operands of its backward."""

    @staticmethod
    def forward(ctx, value: Callable[[Tensor], Tensor], x, weight, bias, fp8_layer: FollowedLinear | None):
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            y = value(x)
            ctx.precision = fp8_layer.one_forward.backward if fp8_layer else None
            ctx.blocks = None
            ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
            # Each operand is saved as codes and their scale, or as a tensor and None
            for_dx = (None, None)
            if ctx.needs_input_grad[1]:
                for_dx = (weight, None)
                frozen = weight if isinstance(weight, Float8Tensor) else None
                codes = fp8_layer.lasting_codes() if fp8_layer else frozen
                if codes is not None:
                    for_dx = (codes.qdata, codes.scale)
                    ctx.blocks = codes.block_size
            for_dw = (None, None)
            if ctx.needs_input_grad[2] and fp8_layer:
                codes = fp8_layer.along_tokens(x)
                for_dw = (codes.qdata, codes.scale)
            elif ctx.needs_input_grad[2]:
                for_dw = (x.to(torch.bfloat16), None)
            ctx.save_for_backward(*for_dx, *for_dw)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx = dw = db = None
        weight, weight_scale, x, x_scale = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            shape = dy.shape
            dy = dy.reshape(-1, shape[-1])
            if ctx.needs_input_grad[1]:
                if weight_scale is not None:
                    weight = _float8(weight, weight_scale, ctx.blocks)
                dx = _input_gradient(dy, weight, ctx.precision)
                dx = dx.view(*shape[:-1], dx.shape[-1]).to(ctx.dtypes[0])
            if ctx.needs_input_grad[2]:
                dw = _weight_gradient(dy, x, x_scale, ctx.precision).to(ctx.dtypes[1])
            if ctx.needs_input_grad[3]:
                db = dy.sum(0, dtype=ctx.dtypes[2])
        return None, dx, dw, db, None


def _input_gradient(dy: Tensor, weight: Tensor | Float8Tensor, precision: BackwardPrecision | None) -> Tensor:
    """Return dX `[T, K]`. `weight` is W, or codes of it."""
    if precision is None:
        dtype = gemm_dtype(dy.device)
        whole = dequantize_weight(weight, dtype) if isinstance(weight, Float8Tensor) else weight.to(dtype)
        return dy.to(dtype).mm(whole)
    codes = weight if isinstance(weight, Float8Tensor) else precision.quantize_weights([weight])[0]
    # Blocks transposed are the same blocks: no second rounding
    transposed = _float8(codes.qdata.t(), codes.scale.t(), codes.block_size[::-1])
    return precision.gemm(precision.quantize_for_backward(dy), transposed)


def _weight_gradient(dy: Tensor, x: Tensor, scale: Tensor | None, precision: BackwardPrecision | None) -> Tensor:
    """Return dW `[N, K]`. `x` is X, or its codes along the tokens `[K, T]` with their scales."""
    if scale is None:
        dtype = gemm_dtype(dy.device)
        return dy.to(dtype).t().mm(x.reshape(-1, x.shape[-1]).to(dtype))
    along_tokens = _float8(x, scale, [1, precision.format.gradient_group])
    return precision.gemm(precision.quantize_for_backward(dy.t()), along_tokens)


def tokens_of(x: Tensor) -> Tensor:
    """Return `[..., K]` as `[T, K]` in BF16."""
    return x.to(torch.bfloat16).reshape(-1, x.shape[-1])


def _float8(codes: Tensor, scale: Tensor, block_size: list[int]) -> Float8Tensor:
    return Float8Tensor(codes, scale, block_size=list(block_size), dtype=torch.bfloat16)


def gemm_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of a backward GEMM: BF16, but FP32 on CPU, which may emulate BF16 ten times slower."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def scaled_mm_gemm(a: Float8Tensor, b: Float8Tensor) -> Tensor:
    """Return `a @ b.T` of the codes by cuBLASLt, BF16 `[M, N]`. Operands are zero-padded to the sizes that it wants.

    Layouts (cuBLASLt's, as torch 2.13 checks them): codes `a` row-major and `b.T` column-major; 1x128 scales
    `[rows, K/128]` with stride `[1, rows]`; 128x128 scales `[L4, N/128]` with stride `[1, L4]`, where L4 is K/128
    rounded up to a multiple of 4; rows of `a` a multiple of 4.
    """
    square = b.block_size[0] == BLOCK
    b_scale = _pad(b.scale, 1, 4, value=1.0) if square else _pad(b.scale, 16, value=1.0).t()
    product = F.scaled_mm(
        _pad_codes(a.qdata, 4),
        _pad_codes(b.qdata, BLOCK if square else 16).t(),
        scale_a=_pad(a.scale, 4, value=1.0).t().contiguous().t(),
        scale_recipe_a=ScalingType.BlockWise1x128,
        scale_b=b_scale.contiguous().t(),
        scale_recipe_b=ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128,
        output_dtype=torch.bfloat16,
    )
    return product[: len(a.qdata), : len(b.qdata)]


def _pad_codes(codes: Tensor, row_multiple: int) -> Tensor:
    return _pad(codes.view(torch.uint8), row_multiple, BLOCK).view(codes.dtype).contiguous()


def _pad(values: Tensor, row_multiple: int, column_multiple: int = 1, value: float = 0) -> Tensor:
    rows, columns = -values.shape[0] % row_multiple, -values.shape[1] % column_multiple
    return F.pad(values, (0, columns, 0, rows), value=value) if rows or columns else values


def require_backend(backend: str, device_capability: tuple[int, int] | None) -> None:
    """Raise `ValueError` unless `backend` can run on a device of this CUDA compute capability (None: on CPU)."""
    if backend == "fake_quant":
        return
    flag = f"fp8_gemm_backend={backend!r}"
    remedy = "Set fp8_gemm_backend='fake_quant', which runs on any device."
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
