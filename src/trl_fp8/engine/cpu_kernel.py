"""What vLLM 0.31 lacks on CPU: a block-FP8 linear kernel, and two repairs of its weight reload.

vLLM's own CPU kernels for block-FP8 need AMX, and the W8A16 one would not quantize activations. The reference kernel
computes what the CUDA kernels compute, W8A8 with fp32 accumulation, out of plain torch operations. It is chosen before
vLLM's own, so that results do not depend on the host. It is made for development, tests and demos, not for speed.
"""

import torch
from torch import nn
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import PlatformEnum, current_platform


class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """`y = dequantize(x) @ dequantize(w).T` in fp32; vLLM's base class quantizes `x` in groups of 1x128 first."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return current_platform.is_cpu(), "the reference kernel runs on CPU only"

    def apply_block_scaled_mm(self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor):
        """A: codes [T, K], B: codes [N, K], As: scales [T, K/128], Bs: scales [N/128, K/128] -> [T, N]."""
        rows, columns = self.weight_group_shape.row, self.weight_group_shape.col
        x = (A.float().unflatten(-1, (-1, columns)) * As.unsqueeze(-1)).flatten(-2)
        blocks = B.float().view(B.shape[0] // rows, rows, B.shape[1] // columns, columns)
        w = (blocks * Bs[:, None, :, None]).view(B.shape)
        return (x @ w.T).to(self.config.out_dtype)


def register_cpu_kernel() -> None:
    """Put the reference kernel first in vLLM's table of block-FP8 kernels for CPU. Does nothing if it is there.

    vLLM 0.31: `register_linear_kernel` fills the per-tensor table only, so the block table is edited directly.
    """
    kernels = linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if ReferenceFp8BlockKernel not in kernels:
        kernels.insert(0, ReferenceFp8BlockKernel)


def prepare_cpu_reload(model: nn.Module) -> None:
    """Before a reload on CPU: let unquantized experts be packed again (vLLM 0.31 packs only if there is no kernel)."""
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def finish_cpu_reload(model: nn.Module) -> None:
    """After a reload on CPU: repack a tied output head, which a stream of only the embedding leaves as it was."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight:
        head.quant_method.process_weights_after_loading(head)
