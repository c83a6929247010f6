"""Formats of FP8 weights and their scales: `BLOCKS`, `TENSOR` and `MXFP8`. Imports no torch.

A format is one `FormatSpec` and an entry of `FORMATS`. Codecs and kernels read from it how to quantize, recipes which
layers can be FP8, and engines and exports how vLLM names and stores codes and scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple


E4M3_MAX = 448.0  # largest value of e4m3 (`torch.float8_e4m3fn`), which has no infinity
BLOCK = 128  # side of a weight's block, and length of an activation's group
# Smallest amax that a weight's scale is made from. Kernels multiply the scales of weight and activation, and some
# kernels return NaN if these scales are tiny (flashinfer#2595: blocks of dead experts). A block whose amax is below
# this floor adds nothing to a sum with a normal block
WEIGHT_AMAX_FLOOR = 1e-12
# Smallest amax of activations in vLLM's kernels (csrc/quantization/w8a8/fp8/per_token_group_quant.cu). The floor only
# keeps an all-zero group from dividing by zero: the amax of a group that matters is larger
ACTIVATION_AMAX_FLOOR = 1e-10
# Two of vLLM's kernels clamp the scale instead of the amax, to at least 1 / (448 * 512): the torch path
# (QuantFP8.forward_native) and the fused activation and quantization (silu_and_mul_per_block_quant). This amax has
# that scale
FLOORED_SCALE_AMAX = 1 / 512
# Smallest amax of activations in vLLM's MXFP8 quantizer (mxfp8_utils.py): its smallest scale is 2^-127, the smallest
# e8m0 number
E8M0_AMAX_FLOOR = 448 * 2.0**-127
# Checksums (codec/digest.py) multiply the word in row r and column c by the key 2 (r + c COLUMN_STEP) + 1. COLUMN_STEP
# can be any large odd int64
COLUMN_STEP = 0x1E3779B97F4A7C15

FIRST_CAPABILITY = (8, 9)  # compute capability of the first GPUs that multiply e4m3 numbers (Ada)
ScaleFormat = Literal["pow2", "fp32"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("pow2", "fp32")
SCALE_BYTES = {"float32": 4, "uint8": 1}  # `FormatSpec.scale_dtype` -> bytes of a scale


class ActivationScaling(NamedTuple):
    """Rules by which an engine's kernel quantizes activations."""

    scale_format: ScaleFormat  # "pow2" (DeepGEMM) or "fp32" (CUTLASS, Triton)
    amax_floor: float = ACTIVATION_AMAX_FLOOR  # smallest amax that a scale is made from
    # Elements that share a scale: a "group" of one token's elements, a whole "token", or the "tensor" (a batch)
    scope: str = "group"
    # Whether the kernel multiplies by the rounded reciprocal of the scale; False: the kernel divides by the scale
    reciprocal: bool = False


def check_scale_format(scale_format: str) -> None:
    """Raise `ValueError` for an unknown format of scales."""
    if scale_format not in SCALE_FORMATS:
        raise ValueError(
            f"scale_format={scale_format!r} is not a scale format: expected 'pow2' (a power of two, exact in BF16) or "
            "'fp32' (amax / 448, one rounding less but inexact in BF16)."
        )


@dataclass(frozen=True, repr=False)
class FormatSpec:
    """One format of FP8 weights, and of the activations that they are multiplied with. All codes are e4m3."""

    name: str  # value of the flag fp8_weight_format
    description: str  # the format of the weights in words, for tables and model cards
    help: str  # help text of this value of the flag
    weight_block: tuple[int, int] | None  # rows and columns that share a scale; None: the whole weight
    activation_group: int | None  # number of a token's elements that share a scale; None: all its elements
    weight_amax_floor: float  # smallest amax that a weight's scale is made from
    scale_suffix: str  # a weight's name with this suffix is the name of its scales, in checkpoints and in vLLM
    alignment: int  # both sides of each weight's shard must be multiples of this number
    requirement: str  # what `alignment` and `smallest_side` demand, in words: "shards that ..."
    # Names of vLLM's kernels that are allowed. These kernels read weight and scales anew in each call, so that a sync
    # reaches them, and compute each row independently of the other rows
    kernels: tuple[str, ...]
    readers: str  # a sentence for the model card: which libraries load a checkpoint of the format
    linear_backend: str | None = None  # vLLM's `linear_backend` on CUDA; None: the fastest one (engine/vllm/gemms.py)
    capability: tuple[int, int] = FIRST_CAPABILITY  # compute capability of the first GPUs that multiply in the format
    # Smallest side that the kernel on CUDA takes, of a rank's shard with all layers that vLLM fuses into one
    smallest_side: int = 1
    scale_copies: int = 1  # how many copies of the scales an engine holds
    gemm_backends: tuple[str, ...] = ("fake_quant",)  # values of fp8_gemm_backend that compute with the format
    # Number of elements that share a scale in an FP8 backward: of a gradient, or of an activation along the tokens
    gradient_group: int = BLOCK
    scale_formats: tuple[ScaleFormat, ...] = SCALE_FORMATS  # values of fp8_scale_format that the format can have
    # torch's name of the dtype in which engines and checkpoints hold a scale; "uint8": the exponent of an e8m0 number
    scale_dtype: str = "float32"
    quant_method: str = "fp8"  # name of the format in a checkpoint's config.json
    kept_key: str = "modules_to_not_convert"  # entry of `quantization_config` that lists modules in high precision
    weight_transposed: bool = False  # whether vLLM holds the weight as `[K, N]`
    why_no_experts: str | None = None  # why experts stay in high precision; None: they can be FP8
    why_no_start: str | None = None  # why no policy can start from such a checkpoint, after "with"; None: it can

    def __repr__(self) -> str:
        return f"<{self.description}>"

    @property
    def fused_share_scale(self) -> bool:
        """Return whether the weights that vLLM fuses (q, k and v; gate and up) share one scale."""
        return self.weight_block is None

    @property
    def on_all_gpus(self) -> bool:
        """Return whether the format runs on all GPUs that multiply e4m3 numbers."""
        return self.capability == FIRST_CAPABILITY

    @property
    def quantization_config(self) -> dict:
        """Return the entry of a checkpoint's config.json by which vLLM knows the format."""
        blocks = {"weight_block_size": list(self.weight_block)} if self.weight_block else {}
        return {"quant_method": self.quant_method, "fmt": "e4m3", "activation_scheme": "dynamic"} | blocks

    @property
    def scale_attribute(self) -> str:
        """Return the name of the parameter of vLLM's linear layers that holds the scales."""
        return f"weight{self.scale_suffix}"

    @property
    def scale_bytes(self) -> int:
        return SCALE_BYTES[self.scale_dtype]

    def require_scale_format(self, scale_format: str) -> None:
        """Raise `ValueError` if `scale_format` is unknown, or if weights of this format cannot have it."""
        check_scale_format(scale_format)
        if scale_format not in self.scale_formats:
            raise ValueError(
                f"scale_format={scale_format!r} with weights in the format {self.name!r}, whose scales are "
                f"{self.scale_dtype} exponents of powers of two. Use {list(self.scale_formats)}, or another format."
            )

    def fits(self, rows: float, columns: float) -> bool:
        """Return whether an engine can hold a shard of this size."""
        return not (rows % self.alignment or columns % self.alignment)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape `[..., n, k]` of the scales of a weight `[..., N, K]`. A ragged block has a scale, too."""
        *lead, rows, columns = shape
        block_rows, block_columns = self.weight_block or (rows, columns)
        return *lead, -(-rows // block_rows), -(-columns // block_columns)

    def held_scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales in an engine. If the whole weight has one scale, the scale is 0-d there."""
        return self.scale_shape(shape) if self.weight_block else ()

    def weight_bytes(self, shape: Sequence[int]) -> int:
        """Return how many bytes a weight `[..., N, K]` and its scales take in an engine."""
        return prod(shape) + self.scale_copies * self.scale_bytes * prod(self.scale_shape(shape))


# The format of DeepSeek-V3
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
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        "TritonFp8BlockScaledMMKernel",
        "BlockWiseTorchFP8ScaledMMLinearKernel",
        "Fp8MoeBackend.TRITON",
    ),
    readers="vLLM reads it as it is, transformers dequantizes or runs it.",
    gemm_backends=("fake_quant", "scaled_mm"),
)
# vLLM's `fp8` without blocks. vLLM loads q, k, v (and gate, up) into one parameter with one scale. If their scales
# differ, it dequantizes the weights to FP16 and quantizes them again with the largest scale. Here the fused weights
# share the largest scale from the start. That scale is at least FP16's smallest normal number, so both of vLLM's steps
# are exact, and an engine that loads a checkpoint holds the bytes of a sync (tests/quantization/test_tensor_format.py)
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
    weight_transposed=True,
    why_no_experts="vLLM quantizes the input of per-tensor FP8 experts with one scale per batch",
    why_no_start=(
        "one scale per weight (no weight_block_size in its config), which transformers reads without its scales"
    ),
)
# OCP's microscaling format with e4m3 elements, which Blackwell's tensor cores multiply. The standard leaves the
# rounding of a scale to the quantizer. vLLM rounds amax / 448 up to a power of two, as "pow2" does here, so nothing
# saturates (torchao's RCEIL). The standard's example (FLOOR) saturates an amax above 1.75 times a power of two
MXFP8 = FormatSpec(
    name="mxfp8",
    description="e4m3 with a power of two per 32 elements of a row (MXFP8)",
    help="one power of two per 32 elements of a weight's row and of a token (for Blackwell); experts stay in high "
    "precision.",
    weight_block=(1, 32),
    activation_group=32,
    weight_amax_floor=WEIGHT_AMAX_FLOOR,
    scale_suffix="_scale",
    alignment=32,
    requirement="have sides that are multiples of 32, 128 or more",
    kernels=("ReferenceMxfp8Kernel", "FlashInferCutlassMxfp8LinearKernel"),
    readers="vLLM reads it as it is.",
    linear_backend="flashinfer_cutlass",
    capability=(10, 0),
    smallest_side=128,
    scale_copies=2,  # in the order in which the kernel reads them, and in the order in which a sync writes them
    gradient_group=32,
    scale_formats=("pow2",),
    scale_dtype="uint8",
    quant_method="mxfp8",
    kept_key="ignored_layers",
    why_no_experts="vLLM's kernels for MXFP8 experts rearrange weights and scales, where a sync cannot write",
)
FORMATS: dict[str, FormatSpec] = {spec.name: spec for spec in (BLOCKS, TENSOR, MXFP8)}  # by `FormatSpec.name`


def format_named(name: str) -> FormatSpec:
    """Return the format with this name; raise `ValueError` if there is none."""
    if name not in FORMATS:
        raise ValueError(f"fp8_weight_format={name!r} is not a format of weights. Use one of {list(FORMATS)}.")
    return FORMATS[name]


def format_stored(weight_block: Sequence[int] | None) -> FormatSpec | None:
    """Return the format of a checkpoint with this `weight_block_size`, or None if no format has such blocks.

    `weight_block` None: each weight has one scale.
    """
    block = tuple(weight_block) if weight_block else None
    for spec in FORMATS.values():
        if spec.weight_block == block:
            return spec
    return None
