"""RMS norms that give a row the same bits in every batch, with or without a residual: providers of vLLM's operations.

vLLM's CUDA kernels give a row 1024 threads below 256 tokens and 256 threads from there on, which changes the order of
the sum. With a residual vLLM runs yet another kernel. Its Triton kernel for batch invariance runs one program for each
row, whatever the batch, and rounds x * rstd * weight once. Here that kernel computes both operations:

    rms_norm(x)                     the kernel
    fused_add_rms_norm(x, r)        s = x + r, rounded to BF16; the kernel on s          returns both

A trainer adds the residual itself, in BF16, and calls the norm alone, which gives the same bits. This costs one more
kernel, for the sum, than vLLM's own. torch.compile may merge it with the operation before it.
"""

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant
from vllm.utils.torch_utils import direct_register_custom_op


PROVIDER = "trl_fp8"
OPERATOR = "trl_fp8_rms_norm"  # opaque to the compiler, which would otherwise fuse a norm with its neighbours


def register_cuda_norms() -> None:
    """Register both with vLLM's tables of implementations. Idempotent."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    direct_register_custom_op(OPERATOR, _whole_rows, fake_impl=_like)
    on_gpu = torch.version.cuda is not None
    ir.ops.rms_norm.register_impl(PROVIDER, supported=on_gpu)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=on_gpu)(_add_rms_norm)


def _whole_rows(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return rms_norm_batch_invariant(x, weight, epsilon)


def _like(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    if variance_size is not None:
        raise ValueError(
            f"fp8_forward='one_forward': the engine normalizes by the variance of {variance_size} columns in this "
            "model, which has no kernel that gives a row the same bits in every batch. Set fp8_forward='off'."
        )
    return getattr(torch.ops.vllm, OPERATOR)(x, weight, epsilon)


def _add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    x_residual = x + x_residual
    return _rms_norm(x_residual, weight, epsilon, variance_size), x_residual
