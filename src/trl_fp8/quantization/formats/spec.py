"""`FormatSpec`: all facts of one format of FP8 weights. A plan, a checkpoint's config and an engine's arguments are
made from them without torch; what computes brings torch when it is called.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple


if TYPE_CHECKING:
    from torch import Tensor
    from torchao.quantization import Float8Tensor

ScaleFormat = Literal["pow2", "fp32"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("pow2", "fp32")


# vLLM's activation kernels floor amax here (csrc/quantization/w8a8/fp8/per_token_group_quant.cu); it is far below any
# activation that matters and only keeps an all-zero group from dividing by zero.
ACTIVATION_AMAX_FLOOR = 1e-10
# Where the scale, and not amax, is floored, at 1 / (448 * 512): by vLLM's torch path (input_quant_fp8.py,
# QuantFP8.forward_native) and by its kernel that fuses an activation function with the quantization
# (silu_and_mul_per_block_quant)
FLOORED_SCALE_AMAX = 1 / 512


class ActivationScaling(NamedTuple):
    """How an engine quantizes activations.

    Attributes:
        scale_format: Of the scales: `"pow2"` (DeepGEMM) or `"fp32"` (CUTLASS, Triton).
        amax_floor: Smallest amax that a scale is made from.
        scope: What shares a scale: `"group"` (of 128 elements of a token), `"token"` or `"tensor"` (the whole batch).
        reciprocal: The engine multiplies by a scale's rounded reciprocal where others divide.
    """

    scale_format: ScaleFormat
    amax_floor: float = ACTIVATION_AMAX_FLOOR
    scope: str = "group"
    reciprocal: bool = False


@dataclass(frozen=True, repr=False)
class FormatSpec:
    """One format of FP8 weights, and of the activations that they are multiplied with. All codes are e4m3.

    Attributes:
        name: Value of the flag fp8_weight_format.
        description: Of the weights, for tables and model cards.
        help: Of the flag's value.
        weight_block: Rows and columns of a weight that share a scale. None: the whole weight.
        activation_scope: What of an activation shares a scale, see `ActivationScaling`.
        weight_amax_floor: Smallest amax that a weight's scale is made from.
        scale_suffix: Appended to a weight's checkpoint name, gives its scale's.
        alignment: Both sides of each weight's shard are multiples of it.
        requirement: The same in words, after "shards that".
        kernels: vLLM's kernels that keep weights and scales as they were loaded, so that an audit can read them back.
        readers: Who loads a checkpoint, for its model card.
        linear_backend: vLLM's `linear_backend` on CUDA. None: depends on the GPU (engine/vllm/platforms.py).
        gemm_backends: Values of fp8_gemm_backend that compute with the format.
        why_no_experts: Why experts stay in high precision. None: they need not.
        fused_share_scale: Weights that vLLM fuses (q, k, v and gate, up) have one scale in common.
        fused_bias: The engine adds a bias before it rounds the product to BF16, not after.
    """

    name: str
    description: str
    help: str
    weight_block: tuple[int, int] | None
    activation_scope: str
    weight_amax_floor: float
    scale_suffix: str
    alignment: int
    requirement: str
    kernels: tuple[str, ...]
    readers: str
    linear_backend: str | None = None
    gemm_backends: tuple[str, ...] = ("fake_quant",)
    why_no_experts: str | None = None
    fused_share_scale: bool = False
    fused_bias: bool = False

    def __repr__(self) -> str:
        return f"<{self.description}>"

    @property
    def quantization_config(self) -> dict:
        """What a checkpoint's config.json says of the format, as vLLM's `Fp8Config` reads it."""
        blocks = {"weight_block_size": list(self.weight_block)} if self.weight_block else {}
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | blocks

    def fits(self, rows: float, columns: float) -> bool:
        """Whether an engine can hold a shard of this size."""
        return not (rows % self.alignment or columns % self.alignment)

    def weight_bytes(self, shape: Sequence[int]) -> int:
        """Of a weight `[..., N, K]` with its scales: one byte per element, four per scale."""
        rows, columns = self.weight_block or shape[-2:]
        return prod(shape) + 4 * prod(shape[:-2]) * -(-shape[-2] // rows) * -(-shape[-1] // columns)

    def quantize_weights(self, weights: Sequence["Tensor"], scale_format: ScaleFormat) -> list["Float8Tensor"]:
        """Q(W) of each of `weights` `[..., N, K]`, which vLLM fuses if they are several. Waits for no device: a weight
        that is not finite gets scales that are not.
        """
        from trl_fp8.quantization.blockwise import quantize_weight

        options = {"amax_floor": self.weight_amax_floor, "check_finite": False}
        return [quantize_weight(weight, scale_format, block=self.weight_block, **options) for weight in weights]

    def quantize_activation(self, x: "Tensor", scaling: ActivationScaling, parts: int = 1) -> "Float8Tensor":
        """Q(x), `[..., K]`, as an engine does it whose ranks hold `parts` equal parts of K."""
        from trl_fp8.quantization.blockwise import BLOCK, quantize_activation

        group = BLOCK if self.activation_scope == "group" else x.shape[-1] // parts
        options = {"amax_floor": scaling.amax_floor, "reciprocal": scaling.reciprocal}
        return quantize_activation(x, scaling.scale_format, group=group, **options)

    def sent_scale(self, codes: "Float8Tensor") -> "Tensor":
        """The scales of Q(W) in the shape that checkpoints have."""
        return codes.scale

    def dead_blocks(self, codes: "Float8Tensor", scale_format: ScaleFormat) -> "Tensor":
        """Number of blocks of Q(W) that are as good as zero, on its device: their scale is held at the floor, so that
        elements a thousand times smaller become zero. Such a block computes no NaN, but it does not come back to life
        in the engine either before its weights have grown.
        """
        from trl_fp8.quantization.blockwise import smallest_scale

        return (codes.scale <= smallest_scale(scale_format, self.weight_amax_floor)).sum()
