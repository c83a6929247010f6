"""Flags of the engine's FP8 weights."""

from dataclasses import dataclass
from typing import Any

from trl_fp8.quantization.formats import BLOCKS, FORMATS, check_scale_format, format_named

from .flag import FlagGroup, flag


@dataclass
class WeightFlags(FlagGroup):
    """Which weights of the engine are FP8, and how they are scaled."""

    FP8 = {"fp8_weights": False}

    fp8_weights: bool = flag(
        True,
        "Whether the engine runs the policy's linear layers in FP8 (W8A8). Weights are quantized from the policy at "
        "every sync.",
    )
    fp8_weight_format: str = flag(
        "blocks", "Format of FP8 weights: " + " ".join(f"{name!r}: {spec.help}" for name, spec in FORMATS.items())
    )
    fp8_scale_format: str = flag(
        "pow2",
        "Format of the weight scales: 'pow2' (powers of two: exact in BF16, and lossless where vLLM's "
        "DeepGEMM path requantizes) or 'fp32' (amax / 448).",
    )
    fp8_ignored_modules: list[str] | None = flag(
        None,
        "Linear layers and experts to keep in high precision, by exact name, e.g. "
        "'model.layers.0.mlp.down_proj' or 'model.layers.0.mlp.experts'. Layers that vLLM fuses with a named one "
        "(q, k, v and gate, up) are kept too.",
    )

    def recipe_fields(self) -> dict[str, Any]:
        return {
            "fp8_weights": self.fp8_weights,
            "weight_format": self.fp8_weight_format,
            "scale_format": self.fp8_scale_format,
            "tensor_parallel_size": self.vllm_tensor_parallel_size,
            "ignored_modules": tuple(self.fp8_ignored_modules or ()),
        }

    def resolve(self) -> None:
        if format_named(self.fp8_weight_format) is not BLOCKS and not self.fp8_weights:
            raise ValueError(
                f"fp8_weight_format={self.fp8_weight_format!r} with fp8_weights=False: there are no FP8 weights that "
                "it would concern. Set fp8_weights=True, or remove it."
            )
        try:
            check_scale_format(self.fp8_scale_format)
        except ValueError as error:
            raise ValueError(f"fp8_{error}") from None
