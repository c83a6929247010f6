"""Names of TRL 1.16, transformers and torch that are no interface, and that the layers beside them rely on.

A contract test holds each to the installed version; another finds what is missing. vLLM's are in `upstream.vllm`.
"""

_GENERATION = ["_generate", "_generate_and_score_completions", "_generate_single_turn"]
PRIVATE_NAMES = {  # owner -> name -> layers that use it
    "trl.GRPOTrainer": {
        **dict.fromkeys([*_GENERATION, "_metrics"], "rollouts"),
        "_get_per_token_logps_and_entropies": "features rollouts",
        **dict.fromkeys(["_batch_environments"], "features"),
        "_tokenize_prompts": "features run",
        **dict.fromkeys(["_buffered_inputs", "_last_loaded_step", "_name", "_step"], "run"),
        "_tokenizer": "features",
    },
    "trl.generation.vllm_generation.VLLMGeneration": dict.fromkeys(
        ["_dist", "_init_vllm", "_iter_named_params", "_llm_weights_sleeping"], "engine"
    ),
    "trl.kernels.chunked_logprob": {"_addmm_fp32": "features"},
    "trl.trainer.utils": {"_use_triton": "features"},
    "transformers.Trainer": dict.fromkeys(
        ["_get_output_dir", "_load_optimizer_and_scheduler", "_save_checkpoint"], "run"
    ),
    "transformers.PreTrainedConfig": {"_attn_implementation": "policy"},
    "transformers.PreTrainedModel": {"_keys_to_ignore_on_load_unexpected": "features"},
    "transformers.core_model_loading": {"_weight_conversions": "policy"},
    "transformers.initialization": {"_is_hf_initialized": "features"},
    "transformers.models.auto.configuration_auto._LazyConfigMapping": {"_extra_content": "engine"},
    "torch": {"_foreach_copy_": "features sync"} | dict.fromkeys(["_foreach_max", "_foreach_neg"], "sync"),
    "torch.ops.aten": {
        **dict.fromkeys(["_flash_attention_backward", "_flash_attention_forward"], "features"),
        "_scaled_dot_product_flash_attention_for_cpu": "engine",
    },
    "torch.nn.Module": {
        "_modules": "features",
        "_non_persistent_buffers_set": "recipe",
        "_parameters": "features policy",
    },
}
