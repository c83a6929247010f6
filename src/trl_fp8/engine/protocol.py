"""What any engine tells once after its start: how it computes. What a delivery asks of it: `sync.delivery.Engine`."""

from collections.abc import Mapping
from dataclasses import dataclass

from trl_fp8.quantization.formats.spec import ActivationScaling


@dataclass(frozen=True)
class EngineNumerics:
    """How an engine computes. Whoever follows one asks nothing else."""

    kernels: Mapping[str, int]  # name of each FP8 kernel of linears and experts -> number of layers that it runs
    linears: ActivationScaling | None = None  # how FP8 linears quantize their input; None if no linear is FP8
    experts: ActivationScaling | None = None  # how FP8 experts quantize activations; None if no expert is FP8
    fused_experts: bool = False  # experts quantize act(gate) * up in FP32, without rounding it to BF16 first
    query_rounded: bool = False  # attention rounds q to e4m3, as it does k and v
    # Multiplier applied to attention weights before they are rounded to e4m3. Weights are at most 1; FlashAttention 3
    # scales by 256 to use more of e4m3's range. None: they are not rounded
    attention_weight_offset: float | None = None
