"""Where an engine rounds to BF16 between its linears, pinned for a trainer that has to round there too.

vLLM leaves it to the compiler: on CUDA, Inductor or a fused kernel computes a residual sum and its norm, SiLU and
product, or a rotary embedding in FP32 and rounds once. transformers rounds to BF16 after each operation; so do the
separate CUDA kernels for residual sums and SiLU (disassembled from the wheel). e4m3 magnifies every BF16 step of
difference: FP32 between the linears leaves nearly all of the mismatch (docs/numerics.md).

A custom operation is opaque to the compiler, so the separate kernels run, a few more per layer; in what Inductor still
fuses, `emulate_precision_casts` keeps the roundings (on CPU bit for bit: tests/engine/test_rounding.py).
"""

from dataclasses import dataclass

from vllm.config import VllmConfig


# Passes of vLLM's compiler that put such an operation into one kernel with its neighbours
FUSIONS = "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_allreduce_rms", "enable_qk_norm_rope_fusion"


@dataclass(frozen=True)
class RoundingPoints:
    """Which of vLLM's implementations rounds as transformers does."""

    norms: dict[str, str]  # vLLM's IR operation -> its provider
    custom_ops: dict[str, bool]  # other operations -> True for vLLM's custom operation, False for its torch path

    def arguments(self) -> dict[str, dict]:
        """For `vllm.LLM(...)`."""
        priority = {name: [provider] for name, provider in self.norms.items()}
        compilation = {
            "custom_ops": ["all", *(f"-{name}" for name, custom in self.custom_ops.items() if not custom)],
            "pass_config": dict.fromkeys(FUSIONS, False),
            "inductor_compile_config": {"emulate_precision_casts": True},
        }
        return {"kernel_config": {"ir_op_priority": priority}, "compilation_config": compilation}

    def require(self, config: VllmConfig) -> None:
        """Raise `ValueError` naming the settings of a running engine that round elsewhere."""
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
        if found:
            raise ValueError(
                "fp8_forward='full' computes what the engine computes, rounding for rounding, but vllm_engine_kwargs "
                f"lets the engine round elsewhere: {'; '.join(found)}. Nearly all of the mismatch would stay. Remove "
                "these from vllm_engine_kwargs, or set fp8_forward='off'."
            )
