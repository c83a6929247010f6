"""What an FP8 base with adapters patches in other libraries."""

from trl_fp8.upstream.patches import FOR_ONE_BLOCK, ON_INSTANCES, register


register(
    FOR_ONE_BLOCK,
    {
        "transformers.modeling_utils.get_hf_quantizer": (
            "features/shared_base/stored_base.py",
            "A quantizer may empty modules; its config must be of the kind that the checkpoint has.",
        ),
        "vllm.model_executor.model_loader.base_loader.initialize_model": (
            "features/shared_base/engine_adapters.py",
            "Compilers and graphs must see the layers of adapters.",
        ),
    },
)
register(
    ON_INSTANCES,
    {
        "transformers.initialization._is_hf_initialized": (
            "features/shared_base/stored_base.py",
            "Init would write to placeholders.",
        ),
    },
)
