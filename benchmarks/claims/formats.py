"""Weight formats that no CPU engine runs: its BF16 weights, rounded as torchao's tensors of the format round them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale


@dataclass(frozen=True)
class SimulatedFormat:
    """Weights only: activations stay in BF16, so the mismatch is a lower bound of that of kernels which round both.

    Attributes:
        description: Of codes and scales.
        quantize: A weight `[N, K]` in BF16 -> torchao's tensor of it.
    """

    description: str
    quantize: Callable[[Tensor], Tensor]

    def rounded(self, weight: Tensor) -> Tensor:
        """Q(W) dequantized; leading dimensions (experts) are tensors of their own."""
        if weight.dim() > 2:
            return torch.stack([self.rounded(each) for each in weight])
        return self.quantize(weight.to(torch.bfloat16)).dequantize(torch.float32).to(weight.dtype)


def _nvfp4(weight: Tensor) -> Tensor:
    return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.float().abs().max()))


SIMULATED = {
    "mxfp8": SimulatedFormat(
        "MXFP8: e4m3 codes, a power of two for 32 of them",
        lambda weight: MXTensor.to_mx(weight, torch.float8_e4m3fn, 32),
    ),
    "mxfp4": SimulatedFormat(
        "MXFP4: e2m1 codes, a power of two for 32 of them",
        lambda weight: MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32),
    ),
    "nvfp4": SimulatedFormat("NVFP4: e2m1 codes, an e4m3 scale for 16 of them, an FP32 one for all", _nvfp4),
}


@contextmanager
def rounded_weights(model: nn.Module, form: SimulatedFormat) -> Iterator[None]:
    """The linears and experts of `model`'s decoder layers hold rounded weights inside the block."""
    kept = {name: weight.detach().clone() for name, weight in model.named_parameters() if _is_rounded(name, weight)}
    parameters = dict(model.named_parameters())
    try:
        with torch.no_grad():
            for name, weight in kept.items():
                parameters[name].copy_(form.rounded(weight))
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                parameters[name].copy_(weight)


def _is_rounded(name: str, weight: Tensor) -> bool:
    """What an FP8 engine would hold in FP8: no norm, router, embedding or output head."""
    return weight.dim() > 1 and ".layers." in name and ".mlp.gate.weight" not in name
