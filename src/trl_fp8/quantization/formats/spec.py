"""`FormatSpec`: all facts of one format of FP8 weights. Plans, configs and engine arguments are made without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple


if TYPE_CHECKING:
    from torch import Tensor
    from torchao.quantization import Float8Tensor

ScaleFormat = Literal["pow2", "fp32"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("pow2", "fp32")

# Where vLLM's activation kernels floor amax (csrc/quantization/w8a8/fp8/per_token_group_quant.cu): below any that
# matters, only to keep an all-zero group from dividing by zero
ACTIVATION_AMAX_FLOOR = 1e-10
# Where the scale, and not amax, is floored, at 1 / (448 * 512): by vLLM's torch path (QuantFP8.forward_native) and by
# its kernel that fuses an activation function with the quantization (silu_and_mul_per_block_quant)
FLOORED_SCALE_AMAX = 1 / 512


class ActivationScaling(NamedTuple):
    """How an engine quantizes activations."""

    scale_format: ScaleFormat  # "pow2" (DeepGEMM) or "fp32" (CUTLASS, Triton)
    amax_floor: float = ACTIVATION_AMAX_FLOOR  # smallest amax that a scale is made from
    scope: str = "group"  # what shares a scale: "group" (128 elements of a token), "token" or "tensor" (the batch)
    reciprocal: bool = False  # the engine multiplies by a scale's rounded reciprocal where others divide


@dataclass(frozen=True, repr=False)
class FormatSpec:
    """One format of FP8 weights, and of the activations that they are multiplied with. All codes are e4m3."""

    name: str  # value of the flag fp8_weight_format
    description: str  # of the weights, for tables and model cards
    help: str  # of the flag's value
    weight_block: tuple[int, int] | None  # rows and columns that share a scale; None: the whole weight
    activation_scope: str  # see `ActivationScaling.scope`
    weight_amax_floor: float  # smallest amax that a weight's scale is made from
    scale_suffix: str  # appended to a weight's checkpoint name, gives its scale's
    alignment: int  # both sides of each weight's shard are multiples of it
    requirement: str  # the same in words, after "shards that"
    kernels: tuple[str, ...]  # vLLM's that read weight and scales anew in each call and compute each row by itself
    readers: str  # who loads a checkpoint, for its model card
    linear_backend: str | None = None  # vLLM's on CUDA; None: the fastest on the GPU (engine/vllm/gemms.py)
    gemm_backends: tuple[str, ...] = ("fake_quant",)  # values of fp8_gemm_backend that compute with the format
    why_no_experts: str | None = None  # why experts stay in high precision; None: they need not
    fused_share_scale: bool = False  # weights that vLLM fuses (q, k, v and gate, up) have one scale in common

    def __repr__(self) -> str:
        return f"<{self.description}>"

    @property
    def quantization_config(self) -> dict:
        """In a checkpoint's config.json, as vLLM's `Fp8Config` reads it."""
        blocks = {"weight_block_size": list(self.weight_block)} if self.weight_block else {}
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | blocks

    def fits(self, rows: float, columns: float) -> bool:
        """An engine can hold a shard of this size."""
        return not (rows % self.alignment or columns % self.alignment)

    def weight_bytes(self, shape: Sequence[int]) -> int:
        """Of a weight `[..., N, K]` with its scales: one byte per element, four per scale."""
        rows, columns = self.weight_block or shape[-2:]
        return prod(shape) + 4 * prod(shape[:-2]) * -(-shape[-2] // rows) * -(-shape[-1] // columns)

    def quantize_weights(self, weights: Sequence["Tensor"], scale_format: ScaleFormat) -> list["Float8Tensor"]:
        """Q(W) of each of `weights` `[..., N, K]`, which vLLM fuses if they are several; waits for no device."""
        from trl_fp8.quantization.blockwise import quantize_weight

        amax = self.common_amax(weights)
        # A weight that is not finite gets scales that are not
        options = {"amax": amax, "amax_floor": self.weight_amax_floor, "check_finite": False}
        blocks = [self.weight_block or tuple(weight.shape) for weight in weights]
        return [quantize_weight(w, scale_format, block=one, **options) for w, one in zip(weights, blocks, strict=True)]

    def common_amax(self, weights: Sequence["Tensor"]) -> "Tensor | None":
        """The amax that one scale of all of `weights` is made from, on their device; None if blocks have their own."""
        return None

    def quantize_activation(self, x: "Tensor", scaling: ActivationScaling) -> "Float8Tensor":
        """Q(x), `[..., K]`, as an engine does it."""
        from trl_fp8.quantization.blockwise import BLOCK, quantize_activation

        group = BLOCK if self.activation_scope == "group" else x.shape[-1]
        options = {"amax_floor": scaling.amax_floor, "reciprocal": scaling.reciprocal}
        return quantize_activation(x, scaling.scale_format, group=group, **options)

    def sent_scale(self, codes: "Float8Tensor") -> "Tensor":
        """The scales of Q(W) in their shape in checkpoints."""
        return codes.scale

    def dead_scale(self, scale_format: ScaleFormat) -> float:
        """The scale of a block, and the largest of any, that is as good as zero."""
        import torch

        from trl_fp8.quantization.e4m3 import scale_from_amax

        # At the floor, elements a thousand times smaller become zero: no NaN, but also no life before weights grow
        floor = torch.tensor(self.weight_amax_floor, device="cpu")  # no device is waited for
        return scale_from_amax(floor, scale_format).item()
