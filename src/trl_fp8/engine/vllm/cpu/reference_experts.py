"""Unquantized experts of a CPU engine, whose weights stay as they were loaded.

vLLM's CPU kernels pack the weights of experts after a load, so a sync could neither write them nor read them back. The
reference computes what vLLM's `TritonExperts` compute on CUDA. Its sums are FP64, so a token's bits do not depend on
other tokens (reference_linear.py):

    pairs of token and expert, sorted by expert -> gate_up, rounded to BF16 -> activation, in BF16 -> down, in FP32
    -> times the router's weight, rounded to BF16 -> sum over a token's experts, rounded once

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
    """Return (up + 1) * gate * sigmoid(1.702 gate) of clamped gate and up. Their elements alternate in `gate_up`."""
    gate, up = gate_up.double().unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)).to(gate_up.dtype)


SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of GPT-OSS; they are constants in vLLM's kernel, too
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
        dtype, experts_per_token = output.dtype, topk_ids.shape[1]
        experts_P, order_P = topk_ids.flatten().long().sort(stable=True)
        tokens_E = torch.bincount(experts_P, minlength=len(w1)).tolist()
        gate_up = _grouped(hidden_states[order_P // experts_per_token], w1, self.w1_bias, tokens_E, dtype)
        down = _grouped(ACTIVATIONS[activation](gate_up), w2, self.w2_bias, tokens_E, torch.float32)
        weighted = (down * topk_weights.flatten()[order_P, None]).to(dtype).double()
        pairs = torch.empty_like(weighted).index_copy_(0, order_P, weighted)
        output.copy_(pairs.view(*topk_ids.shape, -1).sum(1))


def register_cpu_experts() -> None:
    """Put the reference first in vLLM's list of kernels for unquantized experts on CPU. Idempotent."""
    cpu = unquantized.UnquantizedMoeBackend.CPU
    if ReferenceUnquantizedExperts in unquantized.backend_to_kernel_cls(cpu):
        return

    def with_reference(backend: unquantized.UnquantizedMoeBackend) -> list[type[FusedMoEExperts]]:
        return [*([ReferenceUnquantizedExperts] if backend is cpu else []), *classes(backend)]

    classes = patch(unquantized, "backend_to_kernel_cls", with_reference)


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None, tokens_E: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return each row of x `[P, in]` times the weight `[out, in]` of its expert, plus bias: `[P, out]`.

    Rows are sorted by expert: the first `tokens_E[0]` rows belong to expert 0, and so on.
    """
    return torch.cat(
        [
            linear(rows, weight[expert], None if bias is None else bias[expert], dtype)
            for expert, rows in enumerate(x.split(tokens_E))
            if len(rows)
        ]
    )
