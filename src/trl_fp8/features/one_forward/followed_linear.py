"""The policy's linear layers, computed by the engine, and the GEMMs of their backward.

    forward    y = engine(x): the engine's kernel on the engine's weights. One call computes q, k and v together, and
               one call computes gate and up
    backward   fp8_backward="bf16"   dX = dY @ W,  dW = dY.T @ X                    straight through, unquantized
               fp8_backward="fp8"    dX = Q(dY) @ Q(W),  dW = Q(dY.T) @ Q(X.T).T    FP8 layers, as in Jet-RL (arXiv
                                                                                    2601.14243)

Q quantizes to FP8. For the backward, "bf16" keeps X in BF16, and "fp8" keeps Q(X.T), 1 byte an element. Neither
setting copies the weight. With LoRA the engine has either merged weights, or adapters beside an FP8 base that the
policy shares (features/shared_base). With a shared base, W in the backward is this base, dequantized for the call.

With "fp8" the operands of both GEMMs are rounded to e4m3: weights in their own format (`quantization.formats`),
activations and gradients in groups along the dim that the GEMM contracts. The flag fp8_gemm_backend says how two
quantized operands are multiplied:

- `fake_quant` multiplies the dequantized operands, on any device. With power-of-two scales they are exact in BF16, so
  the result is that of an FP8 GEMM up to the order of accumulation. With fp32 scales a BF16 GEMM rounds both operands
  again (an error of about 0.3 % in the output). On CPU the operands are FP32.
- `scaled_mm` passes the codes to cuBLASLt through `torch.nn.functional.scaled_mm`, on Hopper (compute capability 9.0)
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


# Lower bound of the amax from which a group's scale is computed: the scale of an all-zero group has to be a normal
# fp32 number. It is lower than for activations, because gradients of a mean over many tokens are much smaller
GRADIENT_AMAX_FLOOR = 1e-30
HOPPER = (9, 0)


@dataclass(frozen=True)
class BackwardPrecision:
    """Precision of the backward, from flags that `ForwardFlags` has checked."""

    precision: str = "bf16"  # flag fp8_backward
    format: FormatSpec = BLOCKS  # of the weights that a sync sends to the engine
    scale_format: ScaleFormat = "pow2"  # of these weights
    operand_scale_format: ScaleFormat = "pow2"  # of activations in the engine, and so of X and dY in the backward
    backend: str = "fake_quant"  # flag fp8_gemm_backend

    def quantize_weights(self, weights: Sequence[Tensor]) -> list[Float8Tensor]:
        """Return Q(W) `[N, K]` of weights that share a scale in the engine: the bytes that a sync sends."""
        # A weight that is not finite gives non-finite scales here, but a sync refuses the weight by name
        return quantize_fused([weight.detach().bfloat16() for weight in weights], self.format, self.scale_format)

    @torch.no_grad()
    def quantize_for_backward(self, values: Tensor) -> Float8Tensor:
        """Return Q(X) or Q(dY), in groups along the last dim. An incomplete group counts as padded with zeros."""
        options = {"group": self.format.gradient_group, "amax_floor": GRADIENT_AMAX_FLOOR}
        return quantize_activation(values, self.operand_scale_format, **options)

    def gemm(self, a: Float8Tensor, b: Float8Tensor) -> Tensor:
        """Return `a @ b.T`, in BF16 or FP32. `a` has 1x128 scales, `b` has 128x128 or 1x128 scales."""
        if self.backend == "scaled_mm":
            return scaled_mm_gemm(a, b)
        dtype = gemm_dtype(a.device)
        return dequantize_weight(a, dtype) @ dequantize_weight(b, dtype).T


class FusedCall:
    """A function that several layers call one after another with the same tensor. Its output is computed once."""

    def __init__(self, call: Callable[[Tensor], Tensor], readers: int):
        self._call = call
        self._readers = readers  # number of calls with the same tensor
        self._output: Tensor | None = None
        self._input: ref[Tensor] | None = None
        self._version = 0  # of the input
        self._remaining = 0  # calls that will still read `_output`

    def __call__(self, x: Tensor) -> Tensor:
        """Return `call(x)`, or the last output if its input was the same object and has not changed."""
        if x.is_inference():  # an inference tensor has no version, so a change would not show
            return self._call(x)
        if self._output is None or self._input() is not x or self._version != x._version:
            self._output = self._call(x)
            self._input, self._version = ref(x), x._version
            self._remaining = self._readers
        output = self._output
        self._remaining -= 1
        if not self._remaining:  # free the output with its last reader
            self._output = self._input = None
        return output


class FollowedLinear(nn.Linear):
    """Mixed into the class of a linear layer by `OneForward`, so that the engine computes the layer's output."""

    name: str  # checkpoint name
    is_fp8: bool
    adapted: bool  # the layer has adapters; unless the base is shared, the engine's weight includes them
    engine: Linear
    columns: slice  # the layer's columns in the output of `engine`
    fused: FusedCall  # calls `engine`
    x_t_codes: FusedCall  # computes Q(X.T)

    def forward(self, input: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(input)
        fp8_layer = self if self.is_fp8 and self.one_forward.backward.precision == "fp8" else None
        weight = self.codes if isinstance(self, HoldsCodes) else self.weight
        return StraightThrough.apply(self.value, input, weight, self.bias, fp8_layer)

    def value(self, input: Tensor) -> Tensor:
        """Return the engine's output, adapters included: BF16 `[..., N]` for an input `[..., K]`."""
        y = self.fused(input)[:, self.columns]
        return y.view(*input.shape[:-1], y.shape[-1])

    def lasting_codes(self) -> Float8Tensor | None:
        """Return the weight's FP8 codes if this layer or the engine stores them, else None."""
        if isinstance(self, HoldsCodes):
            return self.codes
        if self.adapted:  # the engine has only codes of the sum with the adapters
            return None
        return self.engine.codes(self.name)


class FollowedAdapter:
    """Mixed into PEFT's wrapper of a `FollowedLinear`: the output is the engine's, the gradients are PEFT's.

        forward    y = engine(x). The engine's weight is Q(W + s B A); with a shared base it is Q(W), and the engine
                   also has A and s B
        backward   gradients of x W.T + s drop(x) A.T B.T, so A and B are trained as without an engine

    The forward has no dropout. The engine never computes x W.T alone, and the backward does not need it: the gradients
    of a sum do not depend on the values of its terms.
    """

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        base = self.base_layer
        if not base.one_forward.on:
            return super().forward(x, *args, **kwargs)
        value = base.value(x)
        policy_output = super().forward(x, *args, **kwargs)  # PEFT's own formula, for the gradients
        return with_value(policy_output, value)


class StraightThrough(torch.autograd.Function):
    """Computes `value(x)`, with the gradients of `x @ weight.T + bias`.

    With an `fp8_layer`, operands of the backward are quantized (`one_forward.backward` of the layer says how).
    """

    @staticmethod
    def forward(ctx, value: Callable[[Tensor], Tensor], x, weight, bias, fp8_layer: FollowedLinear | None):
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            y = value(x)
            ctx.precision = fp8_layer.one_forward.backward if fp8_layer else None  # None: unquantized operands
            ctx.blocks = None  # block size of the weight's codes
            bias_dtype = None if bias is None else bias.dtype
            ctx.dtypes = x.dtype, weight.dtype, bias_dtype
            # For each gradient the operand to keep: (codes, their scale), or (tensor, None)
            w_for_dx = x_for_dw = (None, None)
            if ctx.needs_input_grad[1]:  # the gradient of x; input 0 is `value`
                w_for_dx = (weight, None)
                codes = weight if isinstance(weight, Float8Tensor) else None
                if fp8_layer:
                    codes = fp8_layer.lasting_codes()
                if codes is not None:
                    w_for_dx = (codes.qdata, codes.scale)
                    ctx.blocks = codes.block_size
            if ctx.needs_input_grad[2]:  # the gradient of the weight
                if fp8_layer:
                    codes = fp8_layer.x_t_codes(x)
                    x_for_dw = (codes.qdata, codes.scale)
                else:
                    x_for_dw = (x.to(torch.bfloat16), None)
            ctx.save_for_backward(*w_for_dx, *x_for_dw)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx = dw = db = None
        weight, weight_scale, x, x_scale = ctx.saved_tensors  # codes if there is a scale
        shape = dy.shape
        with torch.autocast(dy.device.type, enabled=False):
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
    """Return dX `[T, K]`. `weight` is W or its FP8 codes; without `precision` nothing is quantized."""
    is_quantized = isinstance(weight, Float8Tensor)
    if precision is None:
        dtype = gemm_dtype(dy.device)
        weight_NK = dequantize_weight(weight, dtype) if is_quantized else weight.to(dtype)
        return dy.to(dtype).mm(weight_NK)
    codes = weight
    if not is_quantized:
        [codes] = precision.quantize_weights([weight])
    # A transposed block has the same scale, so the codes are transposed without a second rounding
    transposed = _float8(codes.qdata.t(), codes.scale.t(), codes.block_size[::-1])
    return precision.gemm(precision.quantize_for_backward(dy), transposed)


def _weight_gradient(dy: Tensor, x: Tensor, scale: Tensor | None, precision: BackwardPrecision | None) -> Tensor:
    """Return dW `[N, K]`. `x` is X, or its codes along the tokens `[K, T]` with their scales."""
    if scale is None:
        dtype = gemm_dtype(dy.device)
        return dy.to(dtype).t().mm(x.reshape(-1, x.shape[-1]).to(dtype))
    x_t_codes = _float8(x, scale, [1, precision.format.gradient_group])
    return precision.gemm(precision.quantize_for_backward(dy.t()), x_t_codes)


def tokens_of(x: Tensor) -> Tensor:
    """Return `[..., K]` as `[T, K]` in BF16."""
    return x.to(torch.bfloat16).reshape(-1, x.shape[-1])


def _float8(codes: Tensor, scale: Tensor, block_size: list[int]) -> Float8Tensor:
    return Float8Tensor(codes, scale, block_size=list(block_size), dtype=torch.bfloat16)


def gemm_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of a backward GEMM: BF16, but FP32 on CPU, because emulated BF16 may be ten times slower."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def scaled_mm_gemm(a: Float8Tensor, b: Float8Tensor) -> Tensor:
    """Return `a @ b.T`, computed by cuBLASLt in BF16. Operands are padded with zeros to the sizes that it needs.

    torch 2.13 requires these layouts for cuBLASLt. K is the contracted dim, N the number of rows of `b`:

    - codes: `a` row-major with a multiple of 4 rows, `b.T` column-major
    - 1x128 scales: `[rows, K/128]` with stride `[1, rows]`
    - 128x128 scales: `[L4, N/128]` with stride `[1, L4]`, where L4 is K/128 rounded up to a multiple of 4
    """
    a_scale = _pad(a.scale, row_multiple=4, value=1.0).t()
    if b.block_size[0] == BLOCK:  # 128x128 scales
        b_codes = _pad_codes(b.qdata, row_multiple=BLOCK)
        b_scale = _pad(b.scale, row_multiple=1, column_multiple=4, value=1.0)
        b_recipe = ScalingType.BlockWise128x128
    else:  # 1x128 scales
        b_codes = _pad_codes(b.qdata, row_multiple=16)
        b_scale = _pad(b.scale, row_multiple=16, value=1.0).t()
        b_recipe = ScalingType.BlockWise1x128
    product = F.scaled_mm(
        _pad_codes(a.qdata, row_multiple=4),
        b_codes.t(),
        scale_a=a_scale.contiguous().t(),
        scale_recipe_a=ScalingType.BlockWise1x128,
        scale_b=b_scale.contiguous().t(),
        scale_recipe_b=b_recipe,
        output_dtype=torch.bfloat16,
    )
    return product[: len(a.qdata), : len(b.qdata)]


def _pad_codes(codes: Tensor, row_multiple: int) -> Tensor:
    return _pad(codes.view(torch.uint8), row_multiple, BLOCK).view(codes.dtype).contiguous()


def _pad(values: Tensor, row_multiple: int, column_multiple: int = 1, value: float = 0) -> Tensor:
    added_rows = -values.shape[0] % row_multiple
    added_columns = -values.shape[1] % column_multiple
    if not (added_rows or added_columns):
        return values
    return F.pad(values, (0, added_columns, 0, added_rows), value=value)


def require_backend(backend: str, device_capability: tuple[int, int] | None) -> None:
    """Raise `ValueError` unless `backend` can run on a device of this CUDA compute capability; None: on CPU."""
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
