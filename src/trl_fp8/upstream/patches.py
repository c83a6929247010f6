"""Every patch that this project makes to another library, and the functions that make those of names.

A patch of another name is an error, and so is one whose name the library no longer has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

from trl_fp8.recipe.families import types_with


READ_IN = {
    "accelerate": "1.15",
    "torch": "2.13",
    "transformers": "5.17",
    "trl": "1.16",
    "vllm": "0.31",
}  # library -> its version
FOR_ONE_BLOCK, FOR_GOOD, REGISTERED, ON_INSTANCES = "for one block", "for good", "registered", "on instances"


class Patch(NamedTuple):
    """What becomes of the target, where in this package, and why there is no other way."""

    how: str
    by: str
    why: str


_CPU, _TILES = "engine/vllm/cpu", "features/one_forward/engine_part/tiles.py"
_LAYERS, _LINEAR = "vllm.model_executor.layers", "vllm.model_executor.kernels.linear"
_MOE = f"{_LAYERS}.fused_moe"
_COHERE = "vllm.model_executor.models.commandr"
_LOADING = "transformers.core_model_loading"
_INVARIANT = "vllm.model_executor.determinism.batch_invariant"
_BLOCK_GEMM = f"{_LAYERS}.quantization.utils.fp8_utils"
_ROUTER = "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter"
_NO_FUNCTION = "The reference kernel goes first on CPU; no function registers"
_FILES = [kind.removesuffix("_text") for kind in types_with("followed")]  # transformers' names of their modules
_PATCHES = {  # how -> target -> (by, why)
    FOR_ONE_BLOCK: {
        "trl.trainer.grpo_trainer.VLLMGeneration": ("rollouts.py", "TRL constructs it by this name; no factory."),
        "trl.trainer.grpo_trainer.create_model_from_path": ("rollouts.py", "TRL loads a whole model by this name."),
        "accelerate.commands.launch.simple_launcher": (
            "commands/train.py",
            "It waits for a child, loses its exit status, and leaves it behind when it is stopped.",
        ),
        "trl.trainer.utils._ChunkedLogProbFunction": (
            "policy/head.py",
            "TRL's output head calls it by this name.",
        ),
        "transformers.modeling_utils.get_hf_quantizer": (
            "features/shared_base/stored_base.py",
            "A quantizer may empty modules; its config must be of the kind that the checkpoint has.",
        ),
        "torch.nn.functional.linear": (
            "features/one_forward/modules/followed_experts.py",
            "Routers call it, or what ZeRO-3 puts in its place.",
        ),
        "trl.generation.vllm_generation.LLM": ("engine/vllm/generation.py", "TRL passes it no further arguments."),
        "vllm.model_executor.model_loader.base_loader.initialize_model": (
            "features/shared_base/engine_adapters.py",
            "Compilers and graphs must see the layers of adapters.",
        ),
        "vllm.model_executor.models.transformers.base.AutoModel": (
            "engine/vllm/fallback.py",
            "It gives the policy's class another base.",
        ),
        "torch.ops._C.init_cpu_memory_env": ("engine/vllm/cpu_platform.py", "It warns where nothing is bound."),
        f"{_INVARIANT}.init_batch_invariance": (
            "features/one_forward/engine_part/invariance.py",
            "It would slow the trainer's NCCL down.",
        ),
    },
    FOR_GOOD: {
        f"{_LINEAR}._POSSIBLE_FP8_BLOCK_KERNELS": (
            f"{_CPU}/reference_linear.py",
            f"{_NO_FUNCTION} block-FP8 linears.",
        ),
        f"{_LINEAR}._POSSIBLE_FP8_KERNELS": (f"{_CPU}/reference_linear.py", f"{_NO_FUNCTION} a kernel before others."),
        "vllm._custom_ops.scaled_fp8_quant": (
            f"{_CPU}/reference_linear.py",
            "Loads per-tensor weights, and CPU has no body.",
        ),
        f"{_LAYERS}.utils.dispatch_cpu_unquantized_gemm": (
            f"{_CPU}/reference_linear.py",
            "An audit cannot read what it packs.",
        ),
        f"{_LAYERS}.mamba.ops.cpu.gdn_attention._cpu_gdn_attention_nonspec": (
            f"{_CPU}/delta_net.py",
            "It reads packed weights, and a prefill gives other bits than decode steps.",
        ),
        f"{_MOE}.oracle.unquantized.backend_to_kernel_cls": (
            f"{_CPU}/reference_experts.py",
            f"{_NO_FUNCTION} experts.",
        ),
        f"{_MOE}.router.cpu_router._softmax_topk": (f"{_CPU}/ops.py", "It is BF16; transformers and CUDA have FP32."),
        **dict.fromkeys(
            (f"transformers.models.{file}.modeling_{file}.apply_rotary_pos_emb" for file in _FILES),
            ("features/one_forward/one_forward.py", "Attention calls it by this name; the engine turns q and k."),
        ),
        f"{_MOE}.router.cpu_router._grouped_topk": (f"{_CPU}/ops.py", "An FP32 sigmoid depends on the place."),
        f"{_MOE}.router.router_factory.CPURouter": (f"{_CPU}/ops.py", "It knows no sigmoid without groups."),
        f"{_COHERE}.layer_norm_func": (f"{_CPU}/ops.py", "Its mean depends on the number of rows; not an operation."),
        f"{_COHERE}.rms_norm_func": (f"{_CPU}/ops.py", "As the other norm of these models."),
        "vllm.distributed.parallel_state._EP": ("upstream/vllm.py", "vLLM makes no group after the first engine."),
        f"{_BLOCK_GEMM}.get_w8a8_block_fp8_configs": (_TILES, "Its tiles depend on the batch."),
        f"{_INVARIANT}._get_matmul_config": (_TILES, "Its tiles depend on the batch, or leave a GPU idle."),
        f"{_MOE}.fused_moe.get_default_config": (_TILES, "Its tiles for batch invariance are slow for FP8."),
    },
    REGISTERED: {
        "vllm.ir.ops.rms_norm": (
            "features/one_forward/engine_part/norms.py",
            "The same bits in every batch; on CPU its mean is FP64.",
        ),
        "vllm.ir.ops.fused_add_rms_norm": (f"{_CPU}/ops.py", "It rounds the residual sum, as transformers does."),
        f"{_LAYERS}.activation.SiluAndMul": (f"{_CPU}/ops.py", "A compiled one depends on the place in a vector."),
        f"{_LAYERS}.activation.GeluAndMul": (f"{_CPU}/ops.py", "It depends on size and layout."),
        "vllm.v1.attention.backends.registry.AttentionBackendEnum": (
            f"{_CPU}/reference_attention.py",
            "vLLM's depends on the batch.",
        ),
        "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend": (f"{_CPU}/latent.py", "As its other attention."),
        "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend": (
            "features/one_forward/engine_part/flash_attention.py",
            "Prefill and decode would run different kernels.",
        ),
        "transformers.AttentionInterface": (
            "policy/hook.py",
            "No hook of a module sees q, k, v after RoPE.",
        ),
        "transformers.AttentionMaskInterface": ("policy/hook.py", "Masks of eager attention with a hook."),
    },
    ON_INSTANCES: {
        f"{_LOADING}._weight_conversions": ("policy/model.py", "save_pretrained would quantize again."),
        "transformers.initialization._is_hf_initialized": (
            "features/shared_base/stored_base.py",
            "Init would write to placeholders.",
        ),
        "trl.GRPOTrainer._last_loaded_step": ("run/syncs.py", "TRL takes weights of one step for the same."),
        "trl.GRPOTrainer._batch_environments": (
            "features/kv_cache/kv_cache.py",
            "TRL tokenizes prompts with their tools.",
        ),
        "torch.nn.Module": ("policy/swapped.py", "The class of what computes: names and state_dict stay."),
        "vllm.multimodal.processing.BaseMultiModalProcessor._apply_prompt_updates": (
            "engine/vllm/images.py",
            "It repeats image tokens that are there.",
        ),
        "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention": (
            "policy/hook.py",
            "Its latents are cached; this and its like call `expand_kv` on them.",
        ),
        f"{_LAYERS}.attention.Attention": (
            "features/kv_cache/engine_scales.py",
            "Its scales as floats; no function sets them.",
        ),
        _ROUTER: (
            "features/router_replay/replay.py",
            "The class of routers, this one and its like: they take no choice.",
        ),
    },
}
PATCHES = {target: Patch(how, *entry) for how, targets in _PATCHES.items() for target, entry in targets.items()}


@contextmanager
def substituted(owner: ModuleType, name: str, replacement: object) -> Iterator[None]:
    """`owner.name` is `replacement` inside the block, and what it was before after it, whatever happens."""
    original = patch(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def patch(owner: ModuleType, name: str, replacement: object) -> object:
    """Make `owner.name` be `replacement`, for good; returns what it was. `RuntimeError` as the module says."""
    target = f"{owner.__name__}.{name}"
    if target not in PATCHES:
        raise RuntimeError(f"{target} is not in the list of patches (upstream/patches.py).")
    library = target.partition(".")[0]
    if name not in vars(owner):
        raise RuntimeError(f"{library} has no {target}, which {READ_IN[library]} had. Install that version.")
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    return original
