"""e4m3 with a scale per 128x128 block of a weight and per 128 elements of a token: DeepSeek-V3's format."""

from .spec import FormatSpec


BLOCK = 128  # side of a weight's block, and length of an activation's group
# Kernels multiply the scales of weight and activation, and some make NaN of very small ones (flashinfer#2595: blocks
# of dead experts). A block whose amax is below this is lost in any sum with another
WEIGHT_AMAX_FLOOR = 1e-12

BLOCKS = FormatSpec(
    name="blocks",
    description="e4m3 in 128x128 blocks",
    help="one scale per 128x128 block of a weight and per 128 elements of a token (DeepSeek-V3's, DeepGEMM's).",
    weight_block=(BLOCK, BLOCK),
    activation_group=BLOCK,
    weight_amax_floor=WEIGHT_AMAX_FLOOR,
    scale_suffix="_scale_inv",
    alignment=BLOCK,
    requirement="fill whole 128x128 blocks",
    kernels=(
        "ReferenceFp8BlockKernel",
        "CutlassFp8BlockScaledMMKernel",
        "DeepGemmFp8BlockScaledMMKernel",
        "TritonFp8BlockScaledMMKernel",
        "BlockWiseTorchFP8ScaledMMLinearKernel",
        "Fp8MoeBackend.TRITON",
    ),
    readers="vLLM reads it as it is, transformers dequantizes or runs it.",
    gemm_backends=("fake_quant", "scaled_mm"),
)
