"""The platforms that there are. What vLLM builds for one of them alone is imported on that one alone."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from trl_fp8.quantization.codec.kernel_check import require_exact_kernels
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.names import WRAPPED
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.recipe.servable import WITHOUT_ENGINE_WORDS

from .platform import Platform


# Elements of a latent without its rotated rest: of as many, FP8 tiles fit into the smaller blocks of Ada and of 12.x
LATENT_IN_99_KIB = 256


@dataclass(frozen=True)
class Cuda(Platform):
    """An NVIDIA GPU of one generation: vLLM's own kernels, those whose tensors a sync can write and read back."""

    capability: tuple[int, int]  # e.g. (9, 0)
    flash_attention: int | None = None  # the version that vLLM runs on it; None: none

    name = "cuda"

    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        only = recipe.format.linear_backend
        swapped = ("flashinfer_cutlass",) if self.capability == (9, 0) else ()  # DeepGEMM, FlashInfer below 32 rows
        return (only,) if only else ("cutlass", "deep_gemm", *swapped, "triton")

    def _kernels_ready(self) -> AbstractContextManager[None]:
        require_exact_kernels(torch.device("cuda", torch.cuda.current_device()))
        return nullcontext()

    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict:
        major, minor = self.capability
        if recipe.quantization_config is not None and self.capability < (8, 9):
            raise ValueError(
                f"fp8_weights={recipe.fp8_weights}, kv_cache_dtype={recipe.kv_cache_dtype!r} on a GPU of compute "
                f"capability {major}.{minor}, which has no units for e4m3: vLLM would store FP8 and compute in BF16. "
                "FP8 starts with Ada (8.9) and Hopper (9.0). Switch it off: fp8_weights=False, kv_cache_dtype='auto'."
            )
        # FlashAttention 3 and Triton's attention read KV scales anew in each call. FlashInfer, which vLLM takes on
        # Blackwell, keeps copies; how FlashAttention 4 rounds attention weights is not known
        attention = "FLASH_ATTN" if self.flash_attention == 3 else "TRITON_ATTN"
        if recipe.decoder == WRAPPED and family_of(config.model_type).sees_images_whole:
            attention = "TRITON_ATTN"
        if latent := getattr(config, "kv_lora_rank", None):  # of MLA's, the one that rounds no query
            attention = "TRITON_MLA"
            if recipe.fp8_kv_cache and latent > LATENT_IN_99_KIB and major in (8, 12):
                raise ValueError(
                    f"kv_cache_dtype={recipe.kv_cache_dtype!r} with latents of {latent} elements (kv_lora_rank) on a "
                    f"GPU of compute capability {major}.{minor}: vLLM's kernel for FP8 latents (TRITON_MLA) needs 100 "
                    "KiB of shared memory for a block, the GPU has 99. BF16 latents fit: set kv_cache_dtype='auto'."
                )
        # FlashInfer, again, keeps a copy of attention sinks
        pinned = recipe.fp8_kv_cache or family_of(config.model_type).sinks
        arguments = {"attention_backend": attention} if pinned else {}
        # DeepGEMM's experts round act(gate) * up as no trainer here does; the others shuffle weights
        return arguments | ({"moe_backend": "triton"} if recipe.has_experts else {})


def platform_of(device: torch.device | None = None) -> Platform:
    """The platform of `device`; None: CUDA if there is a GPU. `ValueError` for other kinds of device."""
    kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        from .cpu_platform import Cpu

        return Cpu()
    if kind == "cuda":
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        return Cuda(torch.cuda.get_device_capability(), get_flash_attn_version())
    raise ValueError(
        f"the trainer runs on {kind!r}: FP8 rollouts run on NVIDIA GPUs, and on CPU (use_cpu=True) to try them. "
        f"Elsewhere train without FP8 and vLLM: {WITHOUT_ENGINE_WORDS}."
    )
