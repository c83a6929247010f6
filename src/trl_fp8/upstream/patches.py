"""The register of patches to other libraries, and the functions that replace names.

The core's patches are listed here; a feature's `__init__.py` adds its own. `patch` raises an error for a name that is
not in the register, or that the library no longer has.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple


FOR_ONE_BLOCK = "for one block"
FOR_GOOD = "for good"
REGISTERED = "registered"  # passed to a function of the library, which from then on uses our class or function
ON_INSTANCES = "on instances"  # changes single objects (an attribute or their class); the library's names stay


class Patch(NamedTuple):
    """An entry of the register."""

    kind: str  # FOR_ONE_BLOCK, FOR_GOOD, REGISTERED or ON_INSTANCES
    by: str  # file of this package that patches
    why: str  # reason why there is no other way


PATCHES: dict[str, Patch] = {}  # dotted name of the target -> its patch


def register(kind: str, patches: Mapping[str, tuple[str, str]]) -> None:
    """Add patches to the register: dotted name of the target -> (file of this package that patches, why)."""
    PATCHES.update((target, Patch(kind, *entry)) for target, entry in patches.items())


_LAYERS = "vllm.model_executor.layers"
_MODELS = "vllm.model_executor.models"
_KERNELS = "vllm.model_executor.kernels.linear"
_EXPERIMENTAL = "trl.experimental"
_ASYNC = f"{_EXPERIMENTAL}.async_grpo.async_grpo_trainer"
# Modules of TRL that have both names, `VLLMGeneration` and `create_model_from_path`. The next two lists add modules
# that have only one of them
_TRAINERS = (
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
    "trl.trainer.distillation_trainer",
    f"{_EXPERIMENTAL}.gold.gold_trainer",
    f"{_EXPERIMENTAL}.iw_opd.iw_opd_trainer",
)
# The trainers of SDFT and SDPO import `VLLMGeneration` from its own module each time they construct it
_STARTS_ENGINE = (*_TRAINERS, "trl.generation.vllm_generation")
_LOADS_MODEL = (*_TRAINERS, f"{_EXPERIMENTAL}.sdft.sdft_trainer", f"{_EXPERIMENTAL}.sdpo.sdpo_trainer", _ASYNC)
_ENGINE_BY_NAME = "TRL constructs its engine by this name and takes no factory; we need our engine there."
_MODEL_BY_NAME = "TRL loads a whole model by this name; with fp8_base=True we need one without its frozen weights."


register(
    FOR_ONE_BLOCK,
    {f"{module}.VLLMGeneration": ("rollouts.py", _ENGINE_BY_NAME) for module in _STARTS_ENGINE}
    | {f"{module}.create_model_from_path": ("rollouts.py", _MODEL_BY_NAME) for module in _LOADS_MODEL}
    | {
        f"{_ASYNC}.AsyncRolloutWorker": (
            "trainers/async_grpo_trainer.py",
            "TRL's rollout process survives a killed trainer and keeps sending requests; we need it to end, too.",
        ),
        f"{_ASYNC}.RolloutQueueDataset": (
            "trainers/async_grpo_trainer.py",
            "TRL drops a sample's weight version after a check of its age; we need the version in the loss.",
        ),
        f"{_ASYNC}.DataCollatorForRollout": (
            "trainers/async_grpo_trainer.py",
            "TRL packs a fixed set of keys; we need versions and token ids beside them.",
        ),
        "transformers.trainer.skip_first_batches": (
            "trainers/iw_opd_trainer.py",
            "accelerate skips batches in a new loader, without TRL's repetition of each batch; we need both.",
        ),
        "accelerate.commands.launch.simple_launcher": (
            "commands/train.py",
            "accelerate starts a child, loses its exit status, and leaves it running when it is stopped itself; we "
            "need this process to become the child.",
        ),
        "trl.trainer.utils._ChunkedLogProbFunction": (
            "policy/swapped.py",
            "TRL computes log-probs by this name; we need those of the engine's logits.",
        ),
        "transformers.trainer.rotate_checkpoints": (
            "run/saving.py",
            "transformers deletes old checkpoints while our marker still calls the new one unfinished; we need the "
            "deletion after the marker's removal.",
        ),
        "transformers.core_model_loading.set_param_for_module": (
            "policy/stored_weights.py",
            "transformers makes new parameters; we need values copied into those that the optimizer has.",
        ),
        "trl.generation.vllm_generation.LLM": (
            "engine/vllm/generation.py",
            "TRL passes vLLM a fixed set of arguments; we need further ones.",
        ),
        f"{_MODELS}.transformers.base.AutoModel": (
            "engine/vllm/environment.py",
            "vLLM changes the base class of transformers' model class, which is also the policy's; we need it "
            "unchanged.",
        ),
        "torch.ops._C.init_cpu_memory_env": (
            "engine/vllm/platform.py",
            "vLLM warns on a host with one NUMA node, where nothing has to be bound.",
        ),
    },
)
register(
    FOR_GOOD,
    {
        f"{_KERNELS}._POSSIBLE_FP8_BLOCK_KERNELS": (
            "engine/vllm/cpu/reference_linear.py",
            "vLLM has no function that registers a block-FP8 kernel; we need the reference kernel first on CPU.",
        ),
        f"{_KERNELS}._POSSIBLE_FP8_KERNELS": (
            "engine/vllm/cpu/reference_linear.py",
            "vLLM adds a registered kernel after its own; we need the reference kernel first on CPU.",
        ),
        "vllm._custom_ops.scaled_fp8_quant": (
            "engine/vllm/cpu/reference_linear.py",
            "vLLM calls it while it loads per-tensor weights and has no code for CPU; we need such code.",
        ),
        f"{_LAYERS}.utils.dispatch_cpu_unquantized_gemm": (
            "engine/vllm/cpu/reference_linear.py",
            "vLLM packs unquantized weights; we need weights that an audit can read.",
        ),
        f"{_LAYERS}.mamba.ops.cpu.gdn_attention._cpu_gdn_attention_nonspec": (
            "engine/vllm/cpu/delta_net.py",
            "vLLM packs weights, and its prefill and its decode steps round differently; we need weights that a sync "
            "can write, and the same bits from both.",
        ),
        f"{_LAYERS}.fused_moe.oracle.unquantized.backend_to_kernel_cls": (
            "engine/vllm/cpu/reference_experts.py",
            "vLLM has no function that registers experts; we need the reference kernel first on CPU.",
        ),
        f"{_LAYERS}.fused_moe.router.cpu_router._softmax_topk": (
            "engine/vllm/cpu/ops.py",
            "vLLM computes this softmax in BF16; we need more bits, as transformers and vLLM on CUDA have them.",
        ),
        f"{_LAYERS}.fused_moe.router.cpu_router._grouped_topk": (
            "engine/vllm/cpu/ops.py",
            "torch's FP32 sigmoid depends on an element's place in a vector; we need one that does not.",
        ),
        f"{_LAYERS}.fused_moe.router.router_factory.CPURouter": (
            "engine/vllm/cpu/ops.py",
            "vLLM's router has a sigmoid only for experts in groups; we need it also for experts without groups.",
        ),
        f"{_MODELS}.commandr.layer_norm_func": (
            "engine/vllm/cpu/ops.py",
            "vLLM compiles it, and its mean depends on the number of rows; we need the same bits in every batch.",
        ),
        f"{_MODELS}.commandr.rms_norm_func": (
            "engine/vllm/cpu/ops.py",
            "vLLM compiles it, too; we need the same bits in every batch.",
        ),
        "vllm.distributed.parallel_state._EP": (
            "upstream/vllm.py",
            "vLLM creates this group only if a process's first engine has experts; we need it if a later one has.",
        ),
    },
)
register(
    REGISTERED,
    {
        "vllm.ir.ops.fused_add_rms_norm": (
            "engine/vllm/cpu/ops.py",
            "vLLM normalizes the FP32 residual sum; we need it rounded to BF16 first, as transformers rounds it.",
        ),
        f"{_LAYERS}.activation.SiluAndMul": (
            "engine/vllm/cpu/ops.py",
            "torch's result depends on an element's place in a vector; we need one that does not.",
        ),
        f"{_LAYERS}.activation.GeluAndMul": (
            "engine/vllm/cpu/ops.py",
            "torch's result depends on a tensor's size and layout; we need one that does not.",
        ),
        "vllm.v1.attention.backends.registry.AttentionBackendEnum": (
            "engine/vllm/cpu/reference_attention.py",
            "vLLM's CPU attention depends on the batch; we need the same bits in every batch.",
        ),
        "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend": (
            "engine/vllm/cpu/reference_attention.py",
            "vLLM's CPU attention for MLA depends on the batch, too; we need the same bits in every batch.",
        ),
        "transformers.AttentionInterface": (
            "policy/hook.py",
            "transformers has no hook that sees q, k and v after RoPE; we need one.",
        ),
        "transformers.AttentionMaskInterface": (
            "policy/hook.py",
            "transformers finds the mask's function by the attention's name; we need one for eager with our hook.",
        ),
    },
)
register(
    ON_INSTANCES,
    {
        "trl.generation.vllm_generation.VLLMGeneration.sync_weights": (
            "engine/vllm/sync_audit.py",
            "TRL calls nothing between a sync and the generation after it; we need to audit there.",
        ),
        "trl.generation.vllm_generation.VLLMGeneration.generate": (
            "engine/vllm/sync_audit.py",
            "TRL calls nothing before a generation without a sync; we need to audit there, too.",
        ),
        "transformers.core_model_loading._weight_conversions": (
            "policy/model.py",
            "transformers undoes its conversions in save_pretrained; we need dequantized weights to stay dequantized.",
        ),
        "trl.GRPOTrainer._last_loaded_step": (
            "run/syncs.py",
            "TRL syncs once a step; we need a sync where weights have changed within the step.",
        ),
        "torch.nn.Module": (
            "policy/swapped.py",
            "The class of a module decides what it computes; we need another computation with the same parameters, "
            "names and hooks, so the module gets another class.",
        ),
        "vllm.multimodal.processing.BaseMultiModalProcessor._apply_prompt_updates": (
            "engine/vllm/generation.py",
            "vLLM adds image tokens to a prompt that has them all; we need that prompt unchanged.",
        ),
        "vllm.model_executor.layers.attention.Attention": (
            "engine/vllm/scale_copies.py",
            "vLLM has no function that sets its scales as floats; we need to set them.",
        ),
        "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention": (
            "policy/hook.py",
            "MLA attention (DeepSeek-V2 and others) caches the input of its `expand_kv`; we need to see that input.",
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
    if name not in vars(owner):
        library = target.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", "of this environment")
        raise RuntimeError(
            f"{library} {version} has no {target}, which trl-fp8 replaces. Install trl-fp8 and its engine again, as "
            "README says: that brings the versions that it was tested with."
        )
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    return original
