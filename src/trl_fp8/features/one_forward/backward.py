"""`BackwardPrecision`: how a trainer with one forward quantizes what it quantizes itself, decided once for all layers.

The forward is the engine's. What is left are weights whose codes an engine holds in parts only, and with
`fp8_backward="fp8"` the operands of both backward GEMMs: rounded to e4m3, weights as their format says
(`quantization.formats`), the others in groups of 128 along the dim that the GEMM contracts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.codec.blockwise import quantize_activation
from trl_fp8.quantization.codec.weights import quantize_fused
from trl_fp8.quantization.formats import BLOCKS, FormatSpec, ScaleFormat


# Gradients of a loss that is a mean over many tokens are far below any activation; the floor only has to keep the
# scale of an all-zero group a normal fp32 number.
GRADIENT_AMAX_FLOOR = 1e-30


@dataclass(frozen=True)
class BackwardPrecision:
    """Values of flags, which `ForwardFlags` has checked, and what they mean for an operand."""

    precision: str = "bf16"  # flag fp8_backward
    format: FormatSpec = BLOCKS  # of the weights; what the sync sends to the engine, as is their `scale_format`
    scale_format: ScaleFormat = "pow2"
    operand_scale_format: ScaleFormat = "pow2"  # of activations in the engine, and so of the backward's operands
    backend: str = "fake_quant"  # flag fp8_gemm_backend, see gemm.py
    # Keep each layer's quantized weight (1 byte per element) until its weight changes. False where the weight that a
    # forward sees is gathered anew each time (FSDP2, ZeRO-3).
    cache_weights: bool = True

    def quantize_weights(self, weights: Sequence[Tensor]) -> list[Float8Tensor]:
        """Q(W), `[N, K]` each, of one weight or of those that the engine fuses: the bytes that a sync sends."""
        # A weight that is not finite gives non-finite scales here; the sync refuses it by name
        return quantize_fused([one.detach().to(torch.bfloat16) for one in weights], self.format, self.scale_format)

    @torch.no_grad()
    def quantize_for_backward(self, values: Tensor) -> Float8Tensor:
        """Q of a backward operand, in groups of 128 along the last dim, as if zero-padded to whole groups."""
        return quantize_activation(values, self.operand_scale_format, amax_floor=GRADIENT_AMAX_FLOOR)
