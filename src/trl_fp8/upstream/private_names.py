"""Private names of vLLM, TRL, transformers, torch and argparse that this package uses.

One contract test looks up each name in the installed version. Another contract test fails if this package uses a
private name that is not listed here, or if a listed name is not used. At the first import `versions.require_versions`
calls `missing`, which looks up the names of vLLM in vLLM's sources.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .patches import PATCHES


_LAYERS = "vllm.model_executor.layers"
_ATTENTION_SCALES = "_q_scale _q_scale_float _k_scale _k_scale_float _k_scale_cpu _v_scale _v_scale_float _v_scale_cpu"
_SELF_DISTILLATION = (
    "_compute_rollout_logps _forward_logits _generate _generate_vllm _get_teacher_context_for_self_distillation "
    "_prepare_training_batch _step _tokenize_prompts"
)
_NAMES = {  # owner -> names
    "trl.GRPOTrainer": (
        "_generate _generate_and_score_completions _generate_single_turn _tokenize_prompts _metrics "
        "_get_per_token_logps_and_entropies _batch_environments _buffered_inputs _compute_loss _last_loaded_step "
        "_name _step _tokenizer"
    ),
    "trl.RLOOTrainer": (
        "_compute_loss _generate _generate_and_score_completions _generate_single_turn "
        "_get_per_token_logps_and_entropies _last_loaded_step _metrics _tokenize_prompts"
    ),
    "trl.DistillationTrainer": "_generate _generate_and_score_completions _generate_single_turn _tokenize_prompts",
    "trl.experimental.sdft.SDFTTrainer": _SELF_DISTILLATION,
    "trl.experimental.sdpo.SDPOTrainer": f"{_SELF_DISTILLATION} _compute_policy_loss",
    "trl.experimental.async_grpo.AsyncGRPOTrainer": "_step_forward_s _streaming_iter _sync_weight",
    "trl.experimental.async_grpo.async_rollout_worker.AsyncRolloutWorker": "_loop_cls",
    "trl.experimental.gold.GOLDTrainer": "_buffered_inputs _buffered_on_policy _fill_buffer",
    "trl.experimental.iw_opd.IWOPDTrainer": "_buffer_step _buffered_inputs _buffered_on_policy_flags _fill_buffer",
    "trl.generation.vllm_generation.VLLMGeneration": "_dist _init_vllm _iter_named_params _llm_weights_sleeping",
    "trl.kernels.chunked_logprob": "_addmm_fp32",
    "trl.trainer.base_trainer": "_BaseTrainer",
    "trl.trainer.utils": "_use_triton",
    "transformers.Trainer": (
        "_get_output_dir _get_train_sampler _load_best_model _load_from_checkpoint _load_optimizer_and_scheduler "
        "_save_checkpoint"
    ),
    "transformers.PreTrainedConfig": "_attn_implementation _commit_hash",
    "transformers.PreTrainedModel": "_keys_to_ignore_on_load_unexpected _load_pretrained_model",
    "transformers.core_model_loading": "_weight_conversions",
    "transformers.initialization": "_is_hf_initialized",
    "transformers.models.auto.configuration_auto._LazyConfigMapping": "_extra_content",
    "argparse.ArgumentParser": "_option_string_actions",
    "torch": "_foreach_copy_ _foreach_max _foreach_neg",
    "torch.ops": "_C",
    "torch.ops.aten": "_flash_attention_backward _flash_attention_forward _scaled_dot_product_flash_attention_for_cpu",
    "torch.distributed.distributed_c10d.ProcessGroupGloo": "_Options",
    "torch.distributed.distributed_c10d.ProcessGroupGloo._Options": "_devices _timeout",
    "torch.multiprocessing.reductions": "rebuild_cuda_tensor reduce_tensor",
    "torch.nn.Module": "_modules _non_persistent_buffers_set _parameters",
    "vllm": "_custom_ops",
    "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator": "destroy",  # internal, though without "_"
    "vllm.distributed.device_communicators.pynccl_wrapper.NCCLLibrary": "ncclGetUniqueId",
    "vllm.distributed.parallel_state": "_EP",
    "vllm.distributed.weight_transfer.nccl_common": "uid_init_process_group",
    "vllm.model_executor.custom_op.CustomOp": "_forward_method",
    "vllm.model_executor.kernels.linear": "_POSSIBLE_FP8_BLOCK_KERNELS _POSSIBLE_FP8_KERNELS",
    f"{_LAYERS}.attention.Attention": _ATTENTION_SCALES,
    f"{_LAYERS}.fused_moe.experts.cpu_moe.CPUUnquantizedExperts": "_supports_activation",
    f"{_LAYERS}.fused_moe.router.base_router.BaseRouter": "_compute_routing",
    f"{_LAYERS}.fused_moe.router.cpu_router": "_softmax_topk _grouped_topk",
    f"{_LAYERS}.mamba.ops.cpu.gdn_attention": "_cpu_gdn_attention_nonspec",
    f"{_LAYERS}.rotary_embedding": "_ROPE_DICT",
    "vllm.model_executor.models.registry": "_LazyRegisteredModel _RegisteredModel",
    "vllm.multimodal.processing.BaseMultiModalProcessor": "_apply_prompt_updates _find_mm_placeholders",
    "vllm.v1.attention.selector": "_cached_get_attn_backend",
    "vllm.v1.worker.gpu_worker.Worker": "_weight_update_active",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "input_batch query_start_loc sampler",  # internal, too
}
PRIVATE_NAMES = {owner: names.split() for owner, names in _NAMES.items()}
# Functions of vLLM that are called, replaced or overridden with exactly these parameters
PARAMETERS = {
    "vllm._custom_ops.scaled_fp8_quant": (
        "input scale num_token_padding scale_ub use_per_token_if_dynamic output group_shape"
    ),
    "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator.broadcast": "self tensor src stream",
    "vllm.distributed.weight_transfer.nccl_common.uid_init_process_group": (
        "nccl_unique_id_bytes rank world_size device"
    ),
    f"{_LAYERS}.fused_moe.experts.cpu_moe.CPUUnquantizedExperts._supports_activation": "activation",
    f"{_LAYERS}.fused_moe.oracle.unquantized.backend_to_kernel_cls": "backend",
    f"{_LAYERS}.fused_moe.router.base_router.BaseRouter._compute_routing": (
        "self hidden_states router_logits indices_type input_ids"
    ),
    f"{_LAYERS}.fused_moe.router.cpu_router._grouped_topk": (
        "gating_output topk renormalize num_expert_group topk_group scoring_func routed_scaling_factor "
        "e_score_correction_bias"
    ),
    f"{_LAYERS}.fused_moe.router.cpu_router._softmax_topk": "router_logits top_k renormalize",
    f"{_LAYERS}.mamba.ops.cpu.gdn_attention._cpu_gdn_attention_nonspec": (
        "layer attn_metadata_i mixed_qkv b a core_attn_out"
    ),
    f"{_LAYERS}.utils.dispatch_cpu_unquantized_gemm": "layer remove_weight",
    "vllm.model_executor.models.commandr.layer_norm_func": "hidden_states weight variance_epsilon",
    "vllm.model_executor.models.commandr.rms_norm_func": "hidden_states weight variance_epsilon",
    "vllm.multimodal.processing.processor.BaseMultiModalProcessor._apply_prompt_updates": (
        "self token_ids mm_prompt_updates"
    ),
    "vllm.multimodal.processing.processor.BaseMultiModalProcessor._find_mm_placeholders": (
        "self new_token_ids mm_prompt_updates"
    ),
}


def missing(package: Path) -> list[str]:
    """Return the names that vLLM's sources in the folder `package` lack, and functions whose parameters differ.

    Modules are read as text: importing them takes ten seconds.
    """
    missing_names = []
    # 1. Names that do not occur in their owner's source, and are no modules
    for target in targets():
        owner, _, name = target.rpartition(".")
        parts_below_vllm = target.split(".")[1:]
        is_module = package.joinpath(*parts_below_vllm).with_suffix(".py").exists()
        if not is_module and not re.search(rf"\b{name}\b", _source(package, owner)):
            missing_names.append(target)
    # 2. Functions that no longer have the same parameters
    for target, names in PARAMETERS.items():
        owner, _, function = target.rpartition(".")
        parameters = names.split()
        definitions = list(_parameters(_source(package, owner), function))
        if target not in missing_names and parameters not in definitions:
            missing_names.append(f"{target}({', '.join(parameters)})")
    return missing_names


def targets() -> list[str]:
    """Return the dotted private names of vLLM and the targets of patches to it, each once."""
    listed = []
    for owner, names in PRIVATE_NAMES.items():
        listed += [f"{owner}.{name}" for name in names]
    listed += PATCHES
    return [target for target in dict.fromkeys(listed) if target.partition(".")[0] == "vllm"]


def _source(package: Path, owner: str) -> str:
    """Return the source in which the names of `owner` are defined: the text of a module, or of all files of a package.

    If `owner` is a class, this is the source of the class's module.
    """
    parts = owner.split(".")[1:]  # below vllm
    while parts:
        path = package.joinpath(*parts)
        if path.is_dir():
            return "".join(file.read_text(encoding="utf-8") for file in sorted(path.glob("*.py")))
        if path.with_suffix(".py").exists():
            return path.with_suffix(".py").read_text(encoding="utf-8")
        parts.pop()  # the name of a class
    return (package / "__init__.py").read_text(encoding="utf-8")


def _parameters(source: str, name: str) -> Iterator[list[str]]:
    """Yield the names of the parameters of each function `name` in a source."""
    for start in re.finditer(rf"\bdef {name}\(", source):
        # Find the end of the list of parameters
        end = start.end()
        open_parentheses = 1
        while open_parentheses and end < len(source):
            if source[end] == "(":
                open_parentheses += 1
            elif source[end] == ")":
                open_parentheses -= 1
            end += 1
        header = source[start.start() : end]
        arguments = ast.parse(f"{header}: pass").body[0].args
        yield [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
