"""What the FP8 KV cache patches in other libraries."""

from trl_fp8.upstream.patches import ON_INSTANCES, register


register(
    ON_INSTANCES,
    {
        "trl.GRPOTrainer._batch_environments": (
            "features/kv_cache/kv_cache.py",
            "TRL tokenizes prompts with their tools.",
        ),
        "vllm.model_executor.layers.attention.Attention": (
            "features/kv_cache/engine_scales.py",
            "Its scales as floats; no function sets them.",
        ),
    },
)
