"""Block-FP8 experts for a CPU engine: everything of vLLM but the kernel,
so that tests reach what surrounds it.

vLLM 0.31 has FP8 expert kernels for GPUs and for CPUs with AMX only. Inside `reference_fp8_experts()` an engine that
is started on any CPU chooses the TRITON backend, whose weights stay as they were loaded, and the class below instead
of the Triton kernels. Loader and `Fp8MoEMethod` are vLLM's own.

It lives in tests because its only use is to test what surrounds the kernel:
a policy with FP8 experts is not offered on CPU.

Per token and expert, as `TritonExperts` computes (accumulation apart, which is in FP64):

    codes(x) per 128 -> gate_up in fp32 -> BF16 -> silu(gate) * up -> codes per 128 -> down in fp32, times the router's
    weight -> BF16; the sum over a token's experts is rounded to BF16 once

Two things depend on how vLLM 0.31 runs `TritonExperts`, so they are arguments:

                                      scales of activations   silu(gate) * up
    DeepGEMM's scales are in use      pow2                    silu and product rounded to BF16, as in dense layers
    else                              fp32                    one kernel with the quantization, nothing rounded before
    else, LoRA or a clamped SwiGLU    fp32                    silu and product rounded to BF16

The first is the default on Hopper where DeepGEMM can be imported (`is_deep_gemm_e8m0_used`), although these experts do
not call it; VLLM_USE_DEEP_GEMM_E8M0=0 switches it off.

Shape letters: T tokens, k experts per token, E experts, I intermediate size, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization import fp8

from trl_fp8 import config
from trl_fp8.quantization.codec.blockwise import quantize_activation
from trl_fp8.quantization.formats import ACTIVATION_AMAX_FLOOR, BLOCK, ScaleFormat
from trl_fp8.recipe import recipe


class ReferenceExperts(TritonExperts):
    """`TritonExperts` with plain torch operations in place of its kernels."""

    scale_format: ScaleFormat = "fp32"
    fused_activation = False

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True  # vLLM's quantization of the input needs a GPU

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **_,
    ) -> None:
        """Compute on hidden_states [T, H]; w1 codes [E, 2I, H]; w2 codes [E, H, I]; topk_weights, topk_ids [T, k]."""
        if activation != MoEActivation.SILU or expert_map is not None or apply_router_weight_on_input:
            raise NotImplementedError("silu, one rank's experts, router weights at the end: nothing else is computed")
        parts = torch.empty(*topk_ids.shape, w2.shape[1], device=output.device)
        for expert in topk_ids.unique().tolist():
            tokens, slots = torch.where(topk_ids == expert)
            x = _round_trip(hidden_states[tokens], self.scale_format)
            gate_up = x.double() @ _dequantized(w1[expert], self.w1_scale[expert]).double().T
            hidden = self.silu_and_mul(*gate_up.float().to(output.dtype).chunk(2, dim=-1))
            down = hidden.double() @ _dequantized(w2[expert], self.w2_scale[expert]).double().T
            parts[tokens, slots] = down.float() * topk_weights[tokens, slots, None]
        output.copy_(parts.to(output.dtype).double().sum(1).float())

    def silu_and_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the e4m3 product of BF16 gate and up, dequantized."""
        if self.fused_activation:  # silu_and_mul_per_block_quant floors the scale at 1 / (448 * 512)
            return _round_trip((F.silu(gate.double()) * up.double()).float(), self.scale_format, amax_floor=1 / 512)
        return _round_trip(F.silu(gate) * up, self.scale_format)


@contextmanager
def reference_fp8_experts(scale_format: ScaleFormat = "fp32", fused_activation: bool = False) -> Iterator[None]:
    """Let engines that start inside the block compute their FP8 experts with `ReferenceExperts`, also after it.

    Only the choice of the backend is replaced. vLLM makes it once per layer, when the model is built.
    """
    options = {"scale_format": scale_format, "fused_activation": fused_activation}
    experts = type("ReferenceExperts", (ReferenceExperts,), options)
    with patch.object(fp8, "select_fp8_moe_backend", lambda **_: (Fp8MoeBackend.TRITON, experts)):
        yield


@contextmanager
def offered_fp8_experts(**options) -> Iterator[None]:
    """Give trainers that start inside the block FP8 experts as on CUDA, computed by `ReferenceExperts`.

    `options` are those of `reference_fp8_experts`.
    """

    def recipe_for_model(model, **flags):
        return recipe.recipe_for_model(model, **(flags | {"expert_kernels": True}))

    with reference_fp8_experts(**options), patch.object(config, "recipe_for_model", recipe_for_model):
        yield


def _round_trip(x: torch.Tensor, scale_format: ScaleFormat, amax_floor: float = ACTIVATION_AMAX_FLOOR) -> torch.Tensor:
    """Return x [T, K] in fp32, rounded to e4m3 in groups of 128."""
    quantized = quantize_activation(x, scale_format, amax_floor=amax_floor)
    return quantized.qdata.float() * quantized.scale.repeat_interleave(BLOCK, -1)


def _dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes [N, K] times scale [N/128, K/128] in fp32 [N, K]."""
    return codes.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
