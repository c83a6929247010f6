"""Which of vLLM's settings let a trainer share an engine's kernels: no compiler fuses them, no batch changes a row.

Left to itself, vLLM lets Inductor or a fused kernel compute a residual sum and its norm, SiLU and product, or a rotary
embedding in one go, and a trainer has nothing to call that gives those bits. A custom operation is opaque to the
compiler, so that the separate kernels run, a few more per layer; in what Inductor still fuses, such as residual sums,
`emulate_precision_casts` keeps the roundings of BF16 arithmetic.

Batch invariance: a kernel may give a row no other bits because of the rows beside it. On CPU the reference kernels see
to that; on CUDA norms of our own (cuda/norms.py), one attention kernel (cuda/attention.py) and vLLM's switch, which
makes it take, for unquantized linears, the output head, routers and experts, Triton kernels in tiles that no batch
changes. Which kernel is what, and why: docs/gpu_kernels.md.
"""

from dataclasses import dataclass

from torch import nn
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from trl_fp8.recipe.messages import listed


SWITCH = "VLLM_BATCH_INVARIANT"
# Passes of vLLM's compiler that put such an operation into one kernel with its neighbours
FUSIONS = "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_allreduce_rms", "enable_qk_norm_rope_fusion"
# Of a router: kernels for few tokens, and cuBLAS, which may split the sum
ROUTER_KERNELS = "allow_ll_bf16_gemm", "allow_fp32_router_gemm", "allow_bf16x3_router_gemm", "allow_cublas_router_gemm"


@dataclass(frozen=True)
class Invariance:
    """The settings of one platform.

    Attributes:
        norms: vLLM's IR operation -> its provider.
        custom_ops: Other operations -> True for vLLM's custom operation, False for its torch path.
        attention: The backend with one kernel for all batches; None: whatever there is.
        switch: vLLM's own has to be on.
    """

    norms: dict[str, str]
    custom_ops: dict[str, bool]
    attention: str | None = None
    switch: bool = False

    def arguments(self) -> dict[str, object]:
        """For `vllm.LLM(...)`."""
        priority = {name: [provider] for name, provider in self.norms.items()}
        compilation = {
            "custom_ops": ["all", *(f"-{name}" for name, custom in self.custom_ops.items() if not custom)],
            "pass_config": dict.fromkeys(FUSIONS, False),
            "inductor_compile_config": {"emulate_precision_casts": True},
        }
        attention = {"attention_backend": self.attention} if self.attention else {}
        return {"kernel_config": {"ir_op_priority": priority}, "compilation_config": compilation} | attention

    def require(self, config: VllmConfig) -> None:
        """Raise `ValueError` naming the settings of a running engine that run other kernels."""
        compilation, priority = config.compilation_config, config.kernel_config.ir_op_priority
        norms = [name for name, provider in self.norms.items() if getattr(priority, name)[0] != provider]
        found = [f"kernel_config ir_op_priority.{name}={getattr(priority, name)}" for name in norms]
        found += [
            f"compilation_config custom_ops={compilation.custom_ops} ({'without' if custom else 'with'} {name})"
            for name, custom in self.custom_ops.items()
            if compilation.is_custom_op_enabled(name) != custom
        ]
        if compilation.mode:  # 0: nothing is compiled
            fused = [name for name in FUSIONS if getattr(compilation.pass_config, name)]
            found += [f"compilation_config pass_config.{name}=True" for name in fused]
            if not compilation.inductor_compile_config.get("emulate_precision_casts"):
                found.append("compilation_config inductor_compile_config without emulate_precision_casts")
        if self.attention and (backend := config.attention_config.backend) and backend.name != self.attention:
            found.append(f"attention_backend={backend.name!r}")
        if self.switch and not envs.VLLM_BATCH_INVARIANT:
            found.append(f"{SWITCH}=0 in the environment")
        if found:
            raise ValueError(
                "fp8_forward='one_forward' computes with the engine's kernels, bit for bit, but vllm_engine_kwargs "
                f"lets the engine run others: {'; '.join(found)}. Nearly all of the mismatch would stay. Remove these "
                "from vllm_engine_kwargs, or set fp8_forward='off'."
            )


def require_invariant_routers(model: nn.Module) -> None:
    """Raise `ValueError` if a router of the engine takes its kernel by the number of tokens, whatever the switch."""
    found = [
        f"{name} ({', '.join(chosen)})"
        for name, module in model.named_modules()
        if isinstance(module, GateLinear)
        and (chosen := [kernel.removeprefix("allow_") for kernel in ROUTER_KERNELS if getattr(module, kernel)])
    ]
    if found:
        raise ValueError(
            "fp8_forward='one_forward': routers of the engine take a kernel by the number of tokens: "
            f"{listed(found, 4)}. A token could go to other experts in another batch. Set fp8_forward='off'."
        )
