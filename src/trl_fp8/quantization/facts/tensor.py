"""e4m3 with one scale per weight and one per token: vLLM's `fp8` without blocks.

vLLM holds q, k, v in one parameter with one scale, and gate, up in another. What it loads with several scales it
dequantizes to FP16 and quantizes again with the largest. Here such weights share a scale from the start, the largest,
and no scale is below FP16's smallest normal number: then both of vLLM's roundings give back what they were given, and
an engine that loads a checkpoint holds the bytes that a sync writes (tests/quantization/test_tensor_format.py).
"""

from .spec import FormatSpec


TENSOR = FormatSpec(
    name="tensor",
    description="e4m3 per tensor",
    help="one scale per weight, common to those that vLLM fuses, and one per token; experts stay in high precision.",
    weight_block=None,
    activation_group=None,
    weight_amax_floor=448 * 2**-14,  # 2^-14 is FP16's smallest normal number
    scale_suffix="_scale",
    alignment=16,
    requirement="have sides that are multiples of 16",
    kernels=("ReferenceFp8TensorKernel", "CutlassFP8ScaledMMLinearKernel"),
    readers="vLLM reads it as it is.",
    linear_backend="cutlass",
    why_no_experts="vLLM quantizes the input of per-tensor FP8 experts with one scale per batch",
    why_no_start=(
        "one scale per weight (no weight_block_size in its config), which transformers reads without its scales"
    ),
)
