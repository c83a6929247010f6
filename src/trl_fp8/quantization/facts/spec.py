"""`FormatSpec`: all facts of one format of FP8 weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, repr=False)
class FormatSpec:
    """One format of FP8 weights, and of the activations that they are multiplied with. All codes are e4m3."""

    name: str  # value of the flag fp8_weight_format
    description: str  # of the weights, for tables and model cards
    help: str  # of the flag's value
    weight_block: tuple[int, int] | None  # rows and columns that share a scale; None: the whole weight
    activation_group: int | None  # elements of a token that share a scale; None: all of them
    weight_amax_floor: float  # smallest amax that a weight's scale is made from
    scale_suffix: str  # appended to a weight's name, in checkpoints and in vLLM, gives its scale's
    alignment: int  # both sides of each weight's shard are multiples of it
    requirement: str  # the same in words, after "shards that"
    kernels: tuple[str, ...]  # vLLM's that read weight and scales anew in each call and compute each row by itself
    readers: str  # who loads a checkpoint, for its model card
    linear_backend: str | None = None  # vLLM's on CUDA; None: the fastest on the GPU (engine/vllm/gemms.py)
    gemm_backends: tuple[str, ...] = ("fake_quant",)  # values of fp8_gemm_backend that compute with the format
    why_no_experts: str | None = None  # why experts stay in high precision; None: they need not
    why_no_start: str | None = None  # why no policy can start from such a checkpoint, after "with"; None: it can

    def __repr__(self) -> str:
        return f"<{self.description}>"

    @property
    def fused_share_scale(self) -> bool:
        """Weights that vLLM fuses (q, k, v and gate, up) have one scale in common, as their parameter has one."""
        return self.weight_block is None

    @property
    def quantization_config(self) -> dict:
        """In a checkpoint's config.json, as vLLM's `Fp8Config` reads it."""
        blocks = {"weight_block_size": list(self.weight_block)} if self.weight_block else {}
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | blocks

    def fits(self, rows: float, columns: float) -> bool:
        """An engine can hold a shard of this size."""
        return not (rows % self.alignment or columns % self.alignment)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """`[..., n, k]` of the scales of a weight `[..., N, K]`; a block that N or K does not fill counts as one."""
        rows, columns = self.weight_block or shape[-2:]
        return *shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)

    def weight_bytes(self, shape: Sequence[int]) -> int:
        """Of a weight `[..., N, K]` with its scales: one byte per element, four per scale."""
        return prod(shape) + 4 * prod(self.scale_shape(shape))
