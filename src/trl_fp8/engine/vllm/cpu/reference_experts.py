"""Unquantized experts of a CPU engine, whose weights stay as they were loaded.

vLLM's CPU kernels pack the weights of experts after a load, so a sync could neither write them nor read them back. The
reference computes what vLLM's `TritonExperts` compute on CUDA. Its sums are FP64, so a token's bits do not depend on
other tokens (reference_linear.py). `ReferenceUnquantizedExperts.apply` computes for each pair of token and expert:

    gate_up    the product with w1, rounded to BF16
    down       activation(gate_up), rounded to BF16, times w2; the product is FP32
    weighted   down times the router's weight, rounded to BF16

The output is the sum of `weighted` over a token's experts, rounded once.

Shape letters: T tokens, K experts per token, P = T * K pairs, E experts, I intermediate size, H hidden size.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from trl_fp8.upstream.patches import patch

from .ops import gated, gelu, silu
from .reference_linear import linear


def swigluoai(gate_up: Tensor) -> Tensor:
    """Return (up + 1) * gate * sigmoid(1.702 gate) of clamped gate and up. In `gate_up` their elements alternate."""
    gate, up = gate_up.double().unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)).to(gate_up.dtype)


# Values of GPT-OSS, which are constants in vLLM's kernel, too
SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702
ACTIVATIONS = {
    MoEActivation.SILU: partial(gated, silu),
    MoEActivation.GELU: partial(gated, gelu),
    MoEActivation.SWIGLUOAI: swigluoai,
}


class ReferenceUnquantizedExperts(CPUUnquantizedExperts):
    """`CPUUnquantizedExperts` with one GEMM for each expert that has tokens, instead of vLLM's packed GEMM."""

    keeps_weights = True  # whether weights stay as they were loaded, see `engine.vllm.layout`
    _supports_activation = staticmethod(ACTIVATIONS.__contains__)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: weights stay as they were loaded."""

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *, apply_router_weight_on_input, **_
    ) -> None:
        """Write each token's weighted sum over its experts to `output` `[T, H]`.

        Shapes: hidden_states [T, H]; w1 [E, 2I, H]; w2 [E, H, I]; topk_weights and topk_ids [T, K].
        """
        if apply_router_weight_on_input:
            raise NotImplementedError("the CPU engine's reference weighs what comes out of experts, not what goes in.")
        dtype = output.dtype
        experts_per_token = topk_ids.shape[1]

        # 1. Sort the pairs by expert. The pairs 0 .. K - 1 belong to token 0, and so on
        experts_P, pairs_P = topk_ids.flatten().long().sort(stable=True)
        counts_E = torch.bincount(experts_P, minlength=len(w1)).tolist()
        x_PH = hidden_states[pairs_P // experts_per_token]

        # 2. Compute each pair's output, and weigh it
        gate_up = _grouped(x_PH, w1, self.w1_bias, counts_E, dtype)
        down = _grouped(ACTIVATIONS[activation](gate_up), w2, self.w2_bias, counts_E, torch.float32)
        weighted = (down * topk_weights.flatten()[pairs_P, None]).to(dtype).double()

        # 3. Undo the sort, and sum over each token's experts
        in_order = torch.empty_like(weighted).index_copy_(0, pairs_P, weighted)
        output.copy_(in_order.view(*topk_ids.shape, -1).sum(1))


def register_cpu_experts() -> None:
    """Put the reference first in vLLM's list of kernels for unquantized experts on CPU. Idempotent."""
    cpu = unquantized.UnquantizedMoeBackend.CPU
    if ReferenceUnquantizedExperts in unquantized.backend_to_kernel_cls(cpu):
        return

    def with_reference(backend: unquantized.UnquantizedMoeBackend) -> list[type[FusedMoEExperts]]:
        classes = original(backend)
        if backend is cpu:
            return [ReferenceUnquantizedExperts, *classes]
        return classes

    original = patch(unquantized, "backend_to_kernel_cls", with_reference)


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None, counts_E: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return each row of x `[P, in]` times the weight `[out, in]` of its expert, plus bias: `[P, out]`.

    Rows are sorted by expert: the first `counts_E[0]` rows belong to expert 0, and so on.
    """
    outputs = []
    for expert, rows in enumerate(x.split(counts_E)):
        if len(rows):
            expert_bias = None if bias is None else bias[expert]
            outputs.append(linear(rows, weight[expert], expert_bias, dtype))
    return torch.cat(outputs)
