"""The trained model's experts, computing what the engine's FP8 experts compute: `FP8ExpertModules.install(...)`.

    pairs of token and expert, sorted by expert
        -> Q(x) @ Q(W13)^T  -> BF16 -> act(gate) * up -> Q(.) @ Q(W2)^T -> times the gate weight
        -> sum over a token's experts

as FP8 linears do (flow.py), with all experts of a layer in one grouped GEMM, and one quantization of each 3-D weight
per optimizer step, which the sync shares.

Shape letters: N tokens, K experts per token, P = N * K pairs, E experts, I intermediate size, H hidden size.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torchao.quantization import Float8Tensor

from trl_fp8.quantization.blockwise import dequantize_weight
from trl_fp8.quantization.formats.spec import FLOORED_SCALE_AMAX
from trl_fp8.recipe.names import expert_modules, listed

from .flow import FP8Flow
from .matmul import compute_dtype
from .quantized_weight import KeepsQuantizedWeights
from .swapped_modules import SwappedModules, swapped_class


class FP8Experts(KeepsQuantizedWeights):
    """Mixed into an experts module's class. `FP8ExpertModules` sets `fp8_flow` and `_quantized`."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        """hidden_states `[N, H]`, top_k_index and top_k_weights `[N, K]` -> `[N, H]` in the dtype of hidden_states."""
        full, compute = self.fp8_flow.forward == "full", compute_dtype(hidden_states)
        with torch.autocast(hidden_states.device.type, enabled=False):
            experts_P, order_P = top_k_index.flatten().sort(stable=True)
            ends_E = torch.searchsorted(experts_P, torch.arange(self.num_experts, device=experts_P.device), right=True)
            x = hidden_states.to(compute)[order_P // top_k_index.shape[1]]
            gate_up = self._grouped("gate_up_proj", x, self.fp8_flow.quantize_input(x) if full else None, ends_E.int())
            hidden, codes = self._activated(gate_up.bfloat16()) if full else (self._apply_gate(gate_up), None)
            y = self._grouped("down_proj", hidden, codes, ends_E.int())
            y = y * top_k_weights.flatten()[order_P, None].to(y.dtype)
            y = y.bfloat16().float() if full else y  # the engine's kernel stores each weighted product
            pairs = torch.zeros_like(y).index_copy(0, order_P, y)
            return pairs.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def _activated(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, Float8Tensor]:
        """act(gate) * up `[P, I]` and Q of it, as the engine's kernel computes them from BF16."""
        if not self.fp8_flow.fused_activation:
            hidden = self._apply_gate(gate_up)
            return hidden, self.fp8_flow.quantize_input(hidden)
        hidden = self._apply_gate(gate_up.float())
        scaling = self.fp8_flow.activation._replace(amax_floor=FLOORED_SCALE_AMAX)
        return hidden, self.fp8_flow.format.quantize_activation(hidden, scaling)

    def _grouped(self, name: str, x: torch.Tensor, codes: Float8Tensor | None, ends_E: torch.Tensor) -> torch.Tensor:
        return _FP8GroupedMM.apply(x, codes, getattr(self, name), self.quantized_weight(name), ends_E)


class _FP8GroupedMM(torch.autograd.Function):
    """`x` or its codes `[P, in]`, and those of the weight -> `[P, out]`, accumulated in fp32.

    The backward is straight-through, with unquantized operands, as that of FP8 linears. Keeps `x` and the parameter
    itself, no copy of the weight.
    """

    @staticmethod
    def forward(ctx, x, x_codes: Float8Tensor | None, weight, weight_codes: Float8Tensor, ends_E: torch.Tensor):
        dtype = _gemm_dtype(x)
        operand = x.to(dtype) if x_codes is None else dequantize_weight(x_codes, dtype)
        ctx.save_for_backward(x, weight, ends_E)
        return F.grouped_mm(operand, dequantize_weight(weight_codes, dtype).transpose(1, 2), offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, ends_E = ctx.saved_tensors
        dtype = _gemm_dtype(x)
        dy, dx, dw = dy.to(dtype), None, None
        if ctx.needs_input_grad[0]:
            dx = F.grouped_mm(dy, weight.to(dtype), offs=ends_E).to(x.dtype)
        if ctx.needs_input_grad[2]:
            dw = F.grouped_mm(dy.t(), x.to(dtype), offs=ends_E).to(weight.dtype)
        return dx, None, dw, None, None


def _gemm_dtype(x: torch.Tensor) -> torch.dtype:
    """CUDA has grouped GEMMs in BF16 only; CPUs without BF16 units emulate it ten times slower than FP32."""
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16


class FP8ExpertModules(SwappedModules):
    """The FP8 experts of one model, by checkpoint name."""

    @classmethod
    def install(cls, model: nn.Module, names: Collection[str], flow: FP8Flow) -> "FP8ExpertModules":
        """Turn experts of `model`, plain or PEFT-wrapped, into FP8 experts, in place; `names` are the checkpoint's."""
        if names and flow.backward == "fp8":
            raise ValueError(
                f"fp8_backward='fp8' with FP8 experts ({listed(names, 1)}): their backward is straight-through only. "
                "Set fp8_backward='bf16', or keep the experts in high precision with fp8_ignored_modules."
            )
        chosen = {name: module for name, module in expert_modules(model) if name in names}
        for module in chosen.values():
            module.__class__ = swapped_class(FP8Experts, type(module), "FP8", ("fp8_flow", "_quantized"))
            module.fp8_flow, module._quantized = flow, {}
        return cls(chosen)
