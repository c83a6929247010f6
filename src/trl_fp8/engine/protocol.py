"""What any engine answers: how it computes, told once after its start, and what a sync came to.

Nothing here knows vLLM. Whoever follows an engine (features/flow.py, features/kv_cache.py) reads `EngineNumerics` and
asks nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trl_fp8.quantization.formats.spec import ActivationScaling
from trl_fp8.quantization.kv_scales import KVScales


@dataclass(frozen=True)
class EngineNumerics:
    """How an engine computes.

    Attributes:
        kernels: Name of each FP8 kernel of linears and experts -> number of layers that it runs.
        linears: How FP8 linears quantize their input. None if no linear is FP8.
        experts: How FP8 experts quantize activations. None if no expert is FP8.
        fused_experts: Whether experts quantize act(gate) * up in FP32, without rounding it to BF16 first.
        query_rounded: Whether attention rounds q to e4m3, as it does k and v.
        attention_weight_offset: Multiplier applied to attention weights before they are rounded to e4m3. Weights are
            at most 1; FlashAttention 3 scales by 256 to use more of e4m3's range. None: they are not rounded.
    """

    kernels: Mapping[str, int]
    linears: ActivationScaling | None = None
    experts: ActivationScaling | None = None
    fused_experts: bool = False
    query_rounded: bool = False
    attention_weight_offset: float | None = None


@dataclass(frozen=True)
class SyncReport:
    """One finished sync. Seconds are wall time.

    Attributes:
        seconds: The whole sync took so long.
        quantize_seconds: The part of it that was spent outside the engine's loader.
        calibration_seconds: The part of it that the KV scales took.
        audited_tensors: Number of tensors that were read back and compared.
        bytes_sent: Bytes of all weights as the engine holds them, scales included.
        fp8_weights: Number of weights that went out in FP8.
        weight_relative_error: Root of the sampled squared quantization error over the squared weight.
        dead_blocks: Name of each FP8 weight with blocks that are as good as zero -> their number.
        kv_scales: Scales that were sent. None if the KV cache is not FP8.
    """

    seconds: float
    quantize_seconds: float
    calibration_seconds: float
    audited_tensors: int
    bytes_sent: int
    fp8_weights: int
    weight_relative_error: float
    dead_blocks: dict[str, int]
    kv_scales: KVScales | None
