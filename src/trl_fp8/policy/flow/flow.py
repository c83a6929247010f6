"""`FP8Flow`: what a linear layer of the trained model computes in FP8, decided once for all layers.

    forward    "weights"  y = x @ Q(W).T             a rollout whose kernel quantizes weights only (W8A16)
               "full"     y = Q(x) @ Q(W).T          W8A8, what vLLM's FP8 linears compute; on a GPU but for the
                                                     order in which they add, which FP64 hides on CPU
    backward   "bf16"     dX = dY @ W, dW = dY.T @ X                      straight through, unquantized operands
               "fp8"      dX = Q(dY) @ Q(W), dW = Q(dY.T) @ Q(Q(X).T).T   all in FP8: Jet-RL, arXiv 2601.14243

Q rounds to e4m3: weights and activations as their format says (`quantization.formats`), the backward's operands in
groups of 128 along the dim that the GEMM contracts. The fields carry the values of the flags fp8_forward, fp8_backward
and fp8_gemm_backend; "off" is no flow at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.blockwise import quantize_activation
from trl_fp8.quantization.e4m3 import check_scale_format
from trl_fp8.quantization.formats.blocks import BLOCKS
from trl_fp8.quantization.formats.spec import ACTIVATION_AMAX_FLOOR, ActivationScaling, FormatSpec, ScaleFormat


BACKENDS = ("fake_quant", "scaled_mm", "torchao")
# Gradients of a loss that is a mean over many tokens are far below any activation; the floor only has to keep the
# scale of an all-zero group a normal fp32 number.
GRADIENT_AMAX_FLOOR = 1e-30


@dataclass(frozen=True)
class FP8Flow:
    """The precision flow of the trainer's FP8 linears, checked when it is made."""

    forward: str = "full"
    backward: str = "bf16"
    format: FormatSpec = BLOCKS  # of the weights; what the sync sends to the engine, as is their `scale_format`
    scale_format: ScaleFormat = "pow2"
    activation: ActivationScaling = ActivationScaling("pow2")  # as the engine's kernel; also the format of gradients
    backend: str = "fake_quant"  # of the FP8 GEMMs, see gemm.py
    fused_activation: bool = False  # in experts, act(gate) * up goes into quantization in fp32, not rounded to BF16
    # Keep each layer's quantized weight (1 byte per element) until its weight changes. False where the weight that a
    # forward sees is gathered anew each time (FSDP2, ZeRO-3).
    cache_weights: bool = True

    def __post_init__(self):
        for flag, value, known in (
            ("fp8_forward", self.forward, ("weights", "full")),
            ("fp8_backward", self.backward, ("bf16", "fp8")),
            ("fp8_gemm_backend", self.backend, BACKENDS),
        ):
            if value not in known:
                raise ValueError(f"{flag}={value!r} is not a precision flow. Use one of {list(known)}.")
        check_scale_format(self.scale_format)
        check_scale_format(self.activation.scale_format)
        if not self.activation.amax_floor > 0:
            raise ValueError(
                f"amax_floor={self.activation.amax_floor} of activations would divide an all-zero group by zero. Use "
                f"a positive number (vLLM's CUDA kernels: {ACTIVATION_AMAX_FLOOR})."
            )
        self._check_combination()

    def quantize_weights(self, weights: Sequence[Tensor]) -> list[Float8Tensor]:
        """Q(W), `[N, K]` each, of one weight or of those that the engine fuses: the bytes that a sync sends."""
        # A weight that is not finite gives non-finite scales here; the sync refuses it by name
        return self.format.quantize_weights([one.detach().to(torch.bfloat16) for one in weights], self.scale_format)

    def quantize_input(self, x: Tensor, parts: int = 1) -> Float8Tensor:
        """Q(x), `[..., K]`, of the BF16-rounded input, of which tensor parallel ranks hold `parts` parts of K."""
        return self.format.quantize_activation(x.to(torch.bfloat16), self.activation, parts)

    @torch.no_grad()
    def quantize_tokens(self, x: Tensor) -> Float8Tensor:
        """Q(x), `[T, K]`, of `[..., K]`, whatever autocast and gradients are set to."""
        with torch.autocast(x.device.type, enabled=False):
            return self.quantize_input(x.reshape(-1, x.shape[-1]))

    def quantize_for_backward(self, values: Tensor) -> Float8Tensor:
        """Q of a backward operand, in groups of 128 along the last dim, as if zero-padded to whole groups."""
        return quantize_activation(values, self.activation.scale_format, amax_floor=GRADIENT_AMAX_FLOOR)

    def _check_combination(self) -> None:
        flag = f"fp8_weight_format={self.format.name!r} with fp8_forward={self.forward!r}"
        if self.forward == "full" and self.activation.scope != self.format.activation_scope:
            raise ValueError(
                f"{flag}: the engine's kernel quantizes activations with one scale per {self.activation.scope}, not "
                f"per {self.format.activation_scope}, which depends on what else is in the batch, so that no trainer "
                "can follow it. Run on a GPU with vLLM's CUTLASS kernels, or set fp8_forward='weights' or 'off'."
            )
        if self.format.fused_share_scale and not self.cache_weights:
            raise ValueError(
                f"{flag} under FSDP2 or DeepSpeed ZeRO-3: layers that vLLM fuses share a scale, and a forward sees "
                "one gathered weight at a time. Set fp8_weight_format='blocks' or fp8_forward='off'."
            )
        flag = f"fp8_gemm_backend={self.backend!r}"
        if self.backend != "fake_quant" and self.forward != "full":
            raise ValueError(
                f"{flag} with fp8_forward={self.forward!r}: without quantized activations no GEMM has two FP8 "
                "operands. Set fp8_forward='full' or fp8_gemm_backend='fake_quant'."
            )
        if self.backend not in self.format.gemm_backends:
            raise ValueError(
                f"{flag} with fp8_weight_format={self.format.name!r}: it multiplies other blocks. Use one of "
                f"{list(self.format.gemm_backends)}, or fp8_weight_format='blocks'."
            )
        if self.backend == "torchao" and self.backward != "fp8":
            raise ValueError(
                f"{flag} with fp8_backward={self.backward!r}: torchao's FP8 GEMM brings its own FP8 backward. "
                "Set fp8_backward='fp8', or another backend."
            )
        formats = self.scale_format, self.activation.scale_format
        if self.backend == "torchao" and formats != ("fp32", "fp32"):
            raise ValueError(
                f"{flag} with weight scales {formats[0]!r} and activation scales {formats[1]!r}: torchao quantizes "
                "with fp32 scales only. Set fp8_scale_format='fp32' and an engine kernel with fp32 activation scales "
                "(CUTLASS, Triton), or another backend."
            )
