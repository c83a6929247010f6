"""BF16 and FP16 in the trainer, emulated: operands and results rounded, sums in FP32, as tensor cores do.

torch.autocast, which the other runs train under, would do it too, but in FP16 many times slower than in FP32 on a CPU
without such units, and with kernels that differ in more than the type. Here one type is exchanged for the other and
nothing else. The output head stays in FP32: TRL multiplies by it with an operation of its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


EMULATED = {"bf16_emulated": torch.bfloat16, "fp16_emulated": torch.float16}
# Of FP16's gradients, whose smallest number is 6e-8; a power of two, so that BF16 would not see it
LOSS_SCALE = 2.0**12
_ROUNDED = (F.linear, F.scaled_dot_product_attention)


class Rounded(torch.autograd.Function):
    """x in `dtype`, held as x was; the gradient likewise, as loss scaling rounds it."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient * LOSS_SCALE).to(ctx.dtype).to(gradient.dtype) / LOSS_SCALE, None


class ComputesIn(TorchFunctionMode):
    """Linear layers and attention inside the block compute in `dtype`; norms, residuals and softmax do not."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in _ROUNDED:
            return function(*args, **kwargs)
        return Rounded.apply(function(*map(self._rounded, args), **kwargs), self.dtype)

    def _rounded(self, value: object) -> object:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return Rounded.apply(value, self.dtype) if is_float and value.dtype == torch.float32 else value
