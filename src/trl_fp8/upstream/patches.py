"""Every patch that this project makes to another library, and the functions that make those of names.

A patch of another name is an error, and so is one whose name the library no longer has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple


READ_IN = {"torch": "2.13", "transformers": "5.17", "trl": "1.16", "vllm": "0.31"}  # library -> its version


class Patch(NamedTuple):
    """What becomes of the target, where in this package, and why there is no other way."""

    how: str
    by: str
    why: str


FOR_ONE_BLOCK, FOR_GOOD, REGISTERED, ON_INSTANCES = "for one block", "for good", "registered", "on instances"
_REFERENCE = "The reference kernel is first in the choice on CPU; no function registers"
PATCHES = {
    "trl.GRPOTrainer": Patch(FOR_ONE_BLOCK, "commands/train.py", "TRL's script constructs it by this name."),
    "trl.trainer.grpo_trainer.VLLMGeneration": Patch(
        FOR_ONE_BLOCK, "trainer.py", "TRL's trainer constructs it by this name, without a factory."
    ),
    "trl.generation.vllm_generation.LLM": Patch(
        FOR_ONE_BLOCK, "engine/vllm/generation.py", "TRL constructs it by this name, and passes on no arguments."
    ),
    "vllm.model_executor.kernels.linear._POSSIBLE_FP8_BLOCK_KERNELS": Patch(
        FOR_GOOD, "engine/vllm/cpu/linear.py", f"{_REFERENCE} block-FP8 linears (only per-tensor ones)."
    ),
    "vllm.model_executor.kernels.linear._POSSIBLE_FP8_KERNELS": Patch(
        FOR_GOOD, "engine/vllm/cpu/linear.py", f"{_REFERENCE} a kernel before others."
    ),
    "vllm._custom_ops.scaled_fp8_quant": Patch(
        FOR_GOOD, "engine/vllm/cpu/linear.py", "Per-tensor weights are loaded through it, and CPU has no body for it."
    ),
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": Patch(
        FOR_GOOD, "engine/vllm/cpu/linear.py", "It packs weights, which could not be read back."
    ),
    "vllm.model_executor.layers.fused_moe.oracle.unquantized.backend_to_kernel_cls": Patch(
        FOR_GOOD, "engine/vllm/cpu/experts.py", f"{_REFERENCE} unquantized experts."
    ),
    "vllm.model_executor.layers.fused_moe.router.cpu_router._softmax_topk": Patch(
        FOR_GOOD, "engine/vllm/cpu/ops.py", "It computes gate weights in BF16, where transformers and CUDA have FP32."
    ),
    "vllm.ir.ops.fused_add_rms_norm": Patch(
        REGISTERED, "engine/vllm/cpu/ops.py", "An implementation that rounds the residual sum, as transformers does."
    ),
    "vllm.v1.attention.backends.registry.AttentionBackendEnum": Patch(
        REGISTERED, "engine/vllm/cpu/attention.py", "An FP8 KV cache on any CPU, rounded to nearest."
    ),
    "transformers.AttentionInterface": Patch(
        REGISTERED, "policy/attention/hook.py", "No hook of a module sees q, k and v after RoPE."
    ),
    "transformers.AttentionMaskInterface": Patch(
        REGISTERED, "policy/attention/hook.py", "Masks of eager attention with a hook."
    ),
    "transformers.core_model_loading._weight_conversions": Patch(
        ON_INSTANCES, "policy/model.py", "save_pretrained would quantize what was dequantized on loading."
    ),
    "trl.GRPOTrainer._batch_environments": Patch(
        ON_INSTANCES, "features/kv_cache.py", "TRL tokenizes prompts with the tools of their environments."
    ),
    "torch.nn.Linear": Patch(ON_INSTANCES, "policy/flow/linear.py", "The class: names and state_dict stay."),
    "torch.nn.Module": Patch(ON_INSTANCES, "policy/flow/bf16_modules.py", "The class of what lies between linears."),
    "transformers.integrations.moe": Patch(ON_INSTANCES, "policy/flow/experts.py", "The class of experts."),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter": Patch(
        ON_INSTANCES, "policy/router.py", "The class of routers, this one and its like: they take no choice."
    ),
}


@contextmanager
def substituted(owner: ModuleType, name: str, replacement: object) -> Iterator[None]:
    """`owner.name` is `replacement` inside the block, and what it was before after it, whatever happens."""
    original = patch(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def patch(owner: ModuleType, name: str, replacement: object) -> object:
    """Make `owner.name` be `replacement`, for good; returns what it was.

    Raises:
        RuntimeError: `PATCHES` does not list it, or the installed library does not have it.
    """
    target = f"{owner.__name__}.{name}"
    if target not in PATCHES:
        raise RuntimeError(f"{target} is not in the list of patches (upstream/patches.py).")
    library = target.partition(".")[0]
    if name not in vars(owner):
        raise RuntimeError(f"{library} has no {target}, which {READ_IN[library]} had. Install that version.")
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    return original
