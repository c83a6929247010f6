"""The platforms that there are. What one of them needs is imported on that one alone."""

import torch

from trl_fp8.recipe.servable import WITHOUT_ENGINE_WORDS

from .platform import Platform


def platform_of(device: torch.device | None = None) -> Platform:
    """The platform of `device`; None: CUDA if there is a GPU. `ValueError` for other kinds of device."""
    kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        from .cpu_platform import Cpu

        return Cpu()
    if kind == "cuda":
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        from .cuda_platform import Cuda

        return Cuda(torch.cuda.get_device_capability(), get_flash_attn_version())
    raise ValueError(
        f"the trainer runs on {kind!r}: FP8 rollouts run on NVIDIA GPUs, and on CPU (use_cpu=True) to try them. "
        f"Elsewhere train without FP8 and vLLM: {WITHOUT_ENGINE_WORDS}."
    )
