"""Norms, activations and gate weights of a CPU engine: a row's bits do not depend on the batch.

torch adds a row's squares in FP32 in an order that depends on the host. For the last elements of a row, which do not
fill a SIMD register, torch runs another implementation of the same function. Neither changes the bits if the operation
is FP64 and its result is cast to the model's dtype. (The cast to BF16 rounds twice, to FP32 and then to BF16, but does
so in every batch.) vLLM also rounds at other places than transformers' BF16 arithmetic does, and e4m3 magnifies every
BF16 step of difference. `register_cpu_ops` makes a CPU engine compute:

    norm                  the normalized value is FP64, rounded as transformers rounds it
    residual add + norm   the sum is rounded to BF16 before it is normalized; vLLM's torch path normalizes the FP32 sum
    Cohere's norms        FP64; vLLM compiles one norm for a single row and another for many
    SiLU, GELU            FP64; torch's kernels for GELU, picked by size and layout, differ in 1 % of BF16 numbers
    gate weights          softmax and sigmoid of a router's logits are FP64; vLLM's CPU router has a softmax in BF16
    rotary embedding      (platform.py) vLLM's torch code: vLLM's kernel for AVX2 truncates the result

Operations on a model's logits remain torch's: for equal BF16 numbers tanh and sigmoid return equal results at every
place of a tensor, and `log_softmax` does so for equal rows (tests/engine/test_batch_invariance.py).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fused_moe.router import cpu_router, router_factory
from vllm.model_executor.models import commandr

from trl_fp8.upstream.patches import patch


PROVIDER = "trl_fp8"


def gated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `activation(x[..., :d]) * x[..., d:]`. Activation and product are both rounded to x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


class ReferenceSiluAndMul(SiluAndMul):
    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        return gated(silu, x)


class ReferenceGeluAndMul(GeluAndMul):
    def forward_native(self, x: Tensor) -> Tensor:
        return gated(partial(gelu, approximate=self.approximate), x)


class OneGroupRouter(cpu_router.CPURouter):
    """vLLM's router, also for experts without groups that have sigmoids (MiniMax-M2) or a bias (ERNIE 4.5).

    vLLM's router computes sigmoids, and adds the bias by which experts are chosen, only for experts in groups. It
    ignores the bias of other experts. So here experts without groups form one group.
    """

    def __init__(self, **options):
        super().__init__(**options)
        is_plain = not self.use_grouped_topk and self.custom_routing_function is None
        has_biased_softmax = self.scoring_func == "softmax" and self.e_score_correction_bias is not None
        if is_plain and (self.scoring_func == "sigmoid" or has_biased_softmax):
            self.use_grouped_topk = True
            self.num_expert_group = 1
            self.topk_group = 1


def register_cpu_ops() -> None:
    """Register norms and activations with vLLM; replace Cohere's norms and routers' functions. Idempotent."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    is_cpu_build = torch.version.cuda is None
    ir.ops.rms_norm.register_impl(PROVIDER, supported=is_cpu_build)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=is_cpu_build)(_add_rms_norm)
    for activation in ReferenceSiluAndMul, ReferenceGeluAndMul:
        CustomOp.register_oot(activation, name=activation.__base__.__name__)
    patch(cpu_router, "_softmax_topk", partial(_wide_logits, cpu_router._softmax_topk))
    patch(cpu_router, "_grouped_topk", partial(_wide_sigmoid, cpu_router._grouped_topk))
    patch(router_factory, "CPURouter", OneGroupRouter)
    patch(commandr, "layer_norm_func", layer_norm)
    patch(commandr, "rms_norm_func", lambda x, weight, epsilon: rms_norm(x, weight.float(), epsilon))


def silu(x: Tensor) -> Tensor:
    """Return SiLU of `x`, cast to its dtype."""
    wide = x.double()
    return (wide * torch.sigmoid(wide)).to(x.dtype)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x`, cast to its dtype."""
    # torch computes (1 + tanh(z)) / 2 and (1 + erf(z)) / 2, which lose all digits where tanh and erf are near -1. They
    # are equal to sigmoid(2 z) and erfc(-z) / 2
    wide = x.double()
    if approximate == "tanh":
        share = torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide.pow(3)))
    else:
        share = torch.special.erfc(wide * -math.sqrt(0.5)) / 2
    return (wide * share).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Return x `[..., K]` over the root mean square of its first `variance_size` columns (None: all), times `weight`.

    The normalized value is rounded to the dtype of `weight`, its product with `weight` to the dtype of `x`.
    """
    wide = x.double()
    mean_square = wide[..., :variance_size].square().mean(-1, keepdim=True)
    normalized = (wide * (mean_square + epsilon).rsqrt()).float()
    if weight is not None:
        normalized = normalized.to(weight.dtype) * weight
    return normalized.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x `[..., K]` minus its mean, over its standard deviation, times `weight`.

    The normalized value is rounded to FP32, its product with `weight` to the dtype of `x`.
    """
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    return rms_norm(centered, weight.float(), epsilon).to(x.dtype)


def _wide_logits(softmax_topk: Callable, router_logits: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    """Call vLLM's `softmax_topk` with FP64 logits, of which it takes the softmax."""
    return softmax_topk(router_logits.double(), *args, **kwargs)


class _RouterLogits:
    """Stand-in for the logits in vLLM's grouped top-k, which calls `logits.float().sigmoid()`. `float` rounds nothing,
    and `sigmoid` computes in FP64.
    """

    def __init__(self, logits: Tensor):
        self._logits = logits

    def float(self) -> "_RouterLogits":
        return self

    def sigmoid(self) -> Tensor:
        return self._logits.double().sigmoid().float()


def _wide_sigmoid(grouped_topk: Callable, gating_output: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
    """Call vLLM's `grouped_topk` so that a sigmoid of the logits is FP64."""
    logits = _RouterLogits(gating_output) if kwargs["scoring_func"] == "sigmoid" else gating_output
    return grouped_topk(logits, **kwargs)


def _add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x + x_residual  # rounded to the dtype of x
    return rms_norm(total, weight, epsilon, variance_size), total
