"""Settings under which vLLM runs each operation as a kernel of its own, and rounds where that kernel does.

Left to itself, vLLM lets Inductor or a fused kernel compute a residual sum and its norm, SiLU and product, or a rotary
embedding in one go, and nobody outside has anything to call that gives those bits. A custom operation is opaque to the
compiler, so that the separate kernels run, a few more per layer; in what Inductor still fuses, such as residual sums,
`emulate_precision_casts` keeps the roundings of BF16 arithmetic.
"""

from dataclasses import dataclass

from vllm.config import VllmConfig


NORMS = "rms_norm", "fused_add_rms_norm"
# Passes of vLLM's compiler that put such an operation into one kernel with its neighbours
FUSIONS = "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "fuse_allreduce_rms", "enable_qk_norm_rope_fusion"


@dataclass(frozen=True)
class SeparateKernels:
    """The kernels that compute norms and other small operations, each apart from its neighbours."""

    norms: str  # provider of vLLM's IR operations `NORMS`
    custom_ops: dict[str, bool]  # other operations -> True for vLLM's custom operation, False for its torch path

    def arguments(self) -> dict[str, object]:
        """For `vllm.LLM(...)`."""
        priority = {name: [self.norms] for name in NORMS}
        compilation = {
            "custom_ops": ["all", *(f"-{name}" for name, custom in self.custom_ops.items() if not custom)],
            "pass_config": dict.fromkeys(FUSIONS, False),
            "inductor_compile_config": {"emulate_precision_casts": True},
        }
        return {"kernel_config": {"ir_op_priority": priority}, "compilation_config": compilation}

    def undone(self, config: VllmConfig) -> list[str]:
        """The settings of a running engine that run other kernels."""
        compilation, priority = config.compilation_config, config.kernel_config.ir_op_priority
        others = {name: first for name in NORMS if (first := getattr(priority, name))[0] != self.norms}
        found = [f"kernel_config ir_op_priority.{name}={first}" for name, first in others.items()]
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
        return found
