"""Names of TRL 1.16, of transformers and of torch that are no interface, and that this project relies on.

Overridden, called, read or written, by the layers that stand beside them. A contract test holds each to the installed
version; another test finds private names that are missing here. vLLM's stand in `upstream.vllm`.
"""

PRIVATE_NAMES = {  # owner -> name -> layers that use it
    "trl.GRPOTrainer": {
        "_batch_environments": "features",
        "_buffered_inputs": "run",
        "_generate": "trainer",
        "_generate_and_score_completions": "trainer",
        "_generate_single_turn": "trainer",
        "_get_per_token_logps_and_entropies": "trainer",
        "_metrics": "trainer",
        "_step": "run",
        "_tokenize_prompts": "features",
        "_tokenizer": "features run",
        "vllm_importance_sampling_clip_max": "features",
        "vllm_importance_sampling_clip_min": "features",
        "vllm_importance_sampling_mode": "features",
    },
    "trl.generation.vllm_generation.VLLMGeneration": {
        "_dist": "engine",
        "_init_vllm": "engine",
        "_iter_named_params": "engine",
        "_llm_weights_sleeping": "engine",
    },
    "transformers.Trainer": {
        "_get_output_dir": "run",
        "_load_optimizer_and_scheduler": "run",
        "_save_checkpoint": "run",
    },
    "transformers.PreTrainedConfig": {"_attn_implementation": "policy"},
    "transformers.core_model_loading": {"_weight_conversions": "policy"},
    "transformers.integrations.moe.ExpertsInterface": {"_apply_gate": "policy"},
    "torch.nn.Module": {"_non_persistent_buffers_set": "recipe", "_parameters": "policy"},
}
