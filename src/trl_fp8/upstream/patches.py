"""The register of patches to other libraries, and the functions that replace names.

The core's patches stand here; a feature's `__init__.py` adds its own. A patch of a name that is not in the register is
an error, and so is a patch of a name that the library no longer has.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple


FOR_ONE_BLOCK, FOR_GOOD, REGISTERED, ON_INSTANCES = "for one block", "for good", "registered", "on instances"


class Patch(NamedTuple):
    """The replacement of the target, the file that makes it, and the reason why there is no other way."""

    kind: str  # FOR_ONE_BLOCK, FOR_GOOD, REGISTERED or ON_INSTANCES
    by: str
    why: str


PATCHES: dict[str, Patch] = {}  # by target


def register(kind: str, patches: Mapping[str, tuple[str, str]]) -> None:
    """Add patches to the register: target -> (file of this package that makes it, why)."""
    PATCHES.update((target, Patch(kind, *entry)) for target, entry in patches.items())


_LAYERS = "vllm.model_executor.layers"
_MODELS, _KERNELS = "vllm.model_executor.models", "vllm.model_executor.kernels.linear"


register(
    FOR_ONE_BLOCK,
    {
        "trl.trainer.grpo_trainer.VLLMGeneration": ("rollouts.py", "TRL constructs it by this name; no factory."),
        "trl.trainer.grpo_trainer.create_model_from_path": ("rollouts.py", "TRL loads a whole model by this name."),
        "trl.trainer.rloo_trainer.VLLMGeneration": ("rollouts.py", "As in GRPO's module."),
        "trl.trainer.rloo_trainer.create_model_from_path": ("rollouts.py", "As in GRPO's module."),
        "trl.trainer.distillation_trainer.VLLMGeneration": ("rollouts.py", "As in GRPO's module."),
        "trl.trainer.distillation_trainer.create_model_from_path": ("rollouts.py", "As in GRPO's module."),
        "trl.generation.vllm_generation.VLLMGeneration": ("rollouts.py", "As in GRPO's module."),
        "trl.experimental.gold.gold_trainer.VLLMGeneration": ("rollouts.py", "As in GRPO's module."),
        "trl.experimental.gold.gold_trainer.create_model_from_path": ("rollouts.py", "As in GRPO's module."),
        "trl.experimental.iw_opd.iw_opd_trainer.VLLMGeneration": ("rollouts.py", "As in GRPO's module."),
        "trl.experimental.iw_opd.iw_opd_trainer.create_model_from_path": ("rollouts.py", "As in GRPO's module."),
        "trl.experimental.sdft.sdft_trainer.create_model_from_path": ("rollouts.py", "As in GRPO's module."),
        "trl.experimental.sdpo.sdpo_trainer.create_model_from_path": ("rollouts.py", "As in GRPO's module."),
        "accelerate.commands.launch.simple_launcher": (
            "commands/train.py",
            "It waits for a child, loses its exit status, and leaves it behind when it is stopped.",
        ),
        "trl.trainer.utils._ChunkedLogProbFunction": ("policy/swapped.py", "TRL's output head calls it by this name."),
        "transformers.core_model_loading.set_param_for_module": (
            "policy/stored_weights.py",
            "It puts new parameters into a model that has an optimizer.",
        ),
        "trl.generation.vllm_generation.LLM": ("engine/vllm/generation.py", "TRL passes it no further arguments."),
        f"{_MODELS}.transformers.base.AutoModel": (
            "engine/vllm/environment.py",
            "It gives the policy's class another base.",
        ),
        "torch.ops._C.init_cpu_memory_env": ("engine/vllm/platform.py", "It warns where nothing is bound."),
    },
)
register(
    FOR_GOOD,
    {
        f"{_KERNELS}._POSSIBLE_FP8_BLOCK_KERNELS": (
            "engine/vllm/cpu/reference_linear.py",
            "The reference kernel goes first on CPU; no function registers block-FP8 linears.",
        ),
        f"{_KERNELS}._POSSIBLE_FP8_KERNELS": (
            "engine/vllm/cpu/reference_linear.py",
            "The reference kernel goes first on CPU; no function registers a kernel before others.",
        ),
        "vllm._custom_ops.scaled_fp8_quant": (
            "engine/vllm/cpu/reference_linear.py",
            "It loads per-tensor weights, and has no code for CPU.",
        ),
        f"{_LAYERS}.utils.dispatch_cpu_unquantized_gemm": (
            "engine/vllm/cpu/reference_linear.py",
            "An audit cannot read what it packs.",
        ),
        f"{_LAYERS}.mamba.ops.cpu.gdn_attention._cpu_gdn_attention_nonspec": (
            "engine/vllm/cpu/delta_net.py",
            "It reads packed weights, and a prefill gives other bits than decode steps.",
        ),
        f"{_LAYERS}.fused_moe.oracle.unquantized.backend_to_kernel_cls": (
            "engine/vllm/cpu/reference_experts.py",
            "The reference kernel goes first on CPU; no function registers experts.",
        ),
        f"{_LAYERS}.fused_moe.router.cpu_router._softmax_topk": (
            "engine/vllm/cpu/ops.py",
            "It is BF16; transformers and CUDA have FP32.",
        ),
        f"{_LAYERS}.fused_moe.router.cpu_router._grouped_topk": (
            "engine/vllm/cpu/ops.py",
            "An FP32 sigmoid depends on the place.",
        ),
        f"{_LAYERS}.fused_moe.router.router_factory.CPURouter": (
            "engine/vllm/cpu/ops.py",
            "It knows no sigmoid without groups.",
        ),
        f"{_MODELS}.commandr.layer_norm_func": (
            "engine/vllm/cpu/ops.py",
            "Its mean depends on the number of rows; not an operation.",
        ),
        f"{_MODELS}.commandr.rms_norm_func": ("engine/vllm/cpu/ops.py", "The same as the other norm of these models."),
        "vllm.distributed.parallel_state._EP": ("upstream/vllm.py", "vLLM makes no group after the first engine."),
    },
)
register(
    REGISTERED,
    {
        "vllm.ir.ops.fused_add_rms_norm": (
            "engine/vllm/cpu/ops.py",
            "It rounds the residual sum, as transformers does.",
        ),
        f"{_LAYERS}.activation.SiluAndMul": (
            "engine/vllm/cpu/ops.py",
            "A compiled one depends on the place in a vector.",
        ),
        f"{_LAYERS}.activation.GeluAndMul": ("engine/vllm/cpu/ops.py", "It depends on size and layout."),
        "vllm.v1.attention.backends.registry.AttentionBackendEnum": (
            "engine/vllm/cpu/reference_attention.py",
            "vLLM's depends on the batch.",
        ),
        "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend": (
            "engine/vllm/cpu/reference_attention.py",
            "For MLA what the entry above is for other attention.",
        ),
        "transformers.AttentionInterface": ("policy/hook.py", "No hook of a module sees q, k, v after RoPE."),
        "transformers.AttentionMaskInterface": ("policy/hook.py", "Masks of eager attention with a hook."),
    },
)
register(
    ON_INSTANCES,
    {
        "trl.generation.vllm_generation.VLLMGeneration.sync_weights": (
            "engine/vllm/sync_audit.py",
            "No callback runs between a sync and what is sampled after it.",
        ),
        "trl.generation.vllm_generation.VLLMGeneration.generate": (
            "engine/vllm/sync_audit.py",
            "The same, of a step without a sync.",
        ),
        "transformers.core_model_loading._weight_conversions": (
            "policy/model.py",
            "save_pretrained would quantize again.",
        ),
        "trl.GRPOTrainer._last_loaded_step": ("run/syncs.py", "TRL assumes that weights of one step are the same."),
        "torch.nn.Module": ("policy/swapped.py", "Modules change class: names and state_dict stay."),
        "vllm.multimodal.processing.BaseMultiModalProcessor._apply_prompt_updates": (
            "engine/vllm/generation.py",
            "It repeats image tokens that are there.",
        ),
        "vllm.model_executor.layers.attention.Attention": (
            "engine/vllm/scale_copies.py",
            "Its scales as floats; no function sets them.",
        ),
        "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention": (
            "policy/hook.py",
            "Its latents are cached; this and its like call `expand_kv` on them.",
        ),
    },
)


@contextmanager
def substituted(owner: ModuleType, name: str, replacement: object) -> Iterator[None]:
    """Replace `owner.name` inside the block; restore it afterwards, also on an exception."""
    original = patch(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def patch(owner: ModuleType, name: str, replacement: object) -> object:
    """Replace `owner.name` permanently. Return the original.

    Raises `RuntimeError` for a name that is not in the register, or that the library no longer has.
    """
    target = f"{owner.__name__}.{name}"
    if target not in PATCHES:
        raise RuntimeError(f"{target} is not in the list of patches (upstream/patches.py).")
    library = target.partition(".")[0]
    if name not in vars(owner):
        found = getattr(sys.modules.get(library), "__version__", "of this environment")
        raise RuntimeError(
            f"{library} {found} has no {target}, which trl-fp8 replaces. Install trl-fp8 and its engine again, as "
            "README says: that brings the versions that it was tested with."
        )
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    return original
