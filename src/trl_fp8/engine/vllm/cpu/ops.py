"""Norm, rotary embedding and gate weights of a CPU engine with the rounding of transformers' BF16 arithmetic.

vLLM's own CPU code rounds elsewhere, and e4m3 magnifies every BF16 step of difference. A CPU engine here computes:

    residual add + norm   the sum is rounded to BF16 before it is normalized; vLLM's torch path normalizes the FP32 sum
    rotary embedding      each product and sum is rounded to nearest; vLLM's kernel for AVX2 rounds the result to zero
    gate weights          the softmax over a router's BF16 logits is FP32; vLLM's CPU router computes it in BF16

transformers does the same, operation for operation (but rounds the gate weights afterwards). vLLM's CUDA kernels share
the sum's rounding and the FP32 softmax, but round the product of norm and weight once, and a rotary embedding once.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.layers.fused_moe.router import cpu_router

from trl_fp8.upstream.patches import patch


PROVIDER = "trl_fp8"


def register_cpu_ops() -> None:
    """Register the norm with vLLM's table of implementations, and replace the router's softmax. Idempotent."""
    op = ir.ops.fused_add_rms_norm
    if PROVIDER not in op.impls:
        op.register_impl(PROVIDER, supported=torch.version.cuda is None)(_add_rms_norm)
        patch(cpu_router, "_softmax_topk", partial(_fp32_logits, cpu_router._softmax_topk))


def _fp32_logits(softmax_topk: Callable, router_logits: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    return softmax_topk(router_logits.float(), *args, **kwargs)


def _add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    x_residual = x + x_residual
    return ir.ops.rms_norm(x_residual, weight, epsilon, variance_size), x_residual
