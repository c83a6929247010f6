"""Unquantized experts of a CPU engine, whose weights stay as they were loaded.

vLLM's CPU kernels pack experts as it loads them: nothing could be written there, or read back. The reference
computes what `TritonExperts` computes on CUDA, the order of sums apart:

    pairs of token and expert, sorted by expert -> gate_up in fp32 -> BF16 -> act(gate) * up in BF16 -> down in fp32,
    times the router's weight -> BF16; the sum over a token's experts is fp32 and rounded once

Shape letters: T tokens, K experts per token, P = T * K pairs, E experts, I intermediate size, H hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from trl_fp8.upstream.patches import patch


ACTIVATIONS = {MoEActivation.SILU: F.silu, MoEActivation.GELU: F.gelu}


class ReferenceUnquantizedExperts(CPUUnquantizedExperts):
    """`CPUUnquantizedExperts` with a grouped GEMM of torch in place of vLLM's packed one."""

    _supports_activation = staticmethod(ACTIVATIONS.__contains__)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: weights stay as they were loaded."""

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *, apply_router_weight_on_input, **_
    ) -> None:
        """hidden_states [T, H]; w1 [E, 2I, H]; w2 [E, H, I]; topk_weights and topk_ids [T, K]; fills output [T, H]."""
        if apply_router_weight_on_input:
            raise NotImplementedError("the CPU engine's reference weighs what comes out of experts, not what goes in.")
        dtype, experts_per_token = output.dtype, topk_ids.shape[1]
        experts_P, order_P = topk_ids.flatten().long().sort(stable=True)
        ends_E = torch.searchsorted(experts_P, torch.arange(len(w1)), right=True).int()
        gate_up = _grouped(hidden_states[order_P // experts_per_token], w1, self.w1_bias, experts_P, ends_E)
        gate, up = gate_up.to(dtype).chunk(2, dim=-1)
        down = _grouped(ACTIVATIONS[activation](gate) * up, w2, self.w2_bias, experts_P, ends_E)
        weighted = (down * topk_weights.flatten()[order_P, None]).to(dtype).float()
        pairs = torch.empty_like(weighted).index_copy_(0, order_P, weighted)
        output.copy_(pairs.view(*topk_ids.shape, -1).sum(1))


def register_cpu_experts() -> None:
    """Put the reference first in vLLM 0.31's choice of kernels for unquantized experts on CPU. Idempotent."""
    cpu = unquantized.UnquantizedMoeBackend.CPU
    if ReferenceUnquantizedExperts in unquantized.backend_to_kernel_cls(cpu):
        return

    def with_reference(backend: unquantized.UnquantizedMoeBackend) -> list[type[FusedMoEExperts]]:
        return [*([ReferenceUnquantizedExperts] if backend is cpu else []), *classes(backend)]

    classes = patch(unquantized, "backend_to_kernel_cls", with_reference)


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None, experts_P: Tensor, ends_E: Tensor) -> Tensor:
    """x `[P, in]`, sorted by expert, through weight `[E, out, in]` -> fp32 `[P, out]`."""
    y = F.grouped_mm(x.float(), weight.float().transpose(1, 2), offs=ends_E)
    return y if bias is None else y + bias[experts_P].float()
