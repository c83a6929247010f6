"""Patches of one forward to other libraries."""

from trl_fp8.recipe.families import types_with
from trl_fp8.upstream.patches import FOR_GOOD, FOR_ONE_BLOCK, REGISTERED, register


FAMILIES = [kind.removesuffix("_text") for kind in types_with("followed")]  # as transformers names its modules

register(
    FOR_ONE_BLOCK,
    {
        "torch.nn.functional.linear": (
            "features/one_forward/modules/followed_experts.py",
            "Routers call it, or what ZeRO-3 puts in its place.",
        ),
        "vllm.model_executor.determinism.batch_invariant.init_batch_invariance": (
            "features/one_forward/engine_part/invariance.py",
            "It would slow the trainer's NCCL down.",
        ),
    },
)
register(
    FOR_GOOD,
    {
        **{
            f"transformers.models.{family}.modeling_{family}.apply_rotary_pos_emb": (
                "features/one_forward/one_forward.py",
                "Attention calls it by this name; the engine turns q and k.",
            )
            for family in FAMILIES
        },
        "vllm.model_executor.layers.quantization.utils.fp8_utils.get_w8a8_block_fp8_configs": (
            "features/one_forward/engine_part/tiles.py",
            "Its tiles depend on the batch.",
        ),
        "vllm.model_executor.determinism.batch_invariant._get_matmul_config": (
            "features/one_forward/engine_part/tiles.py",
            "Its tiles depend on the batch, or leave a GPU idle.",
        ),
        "vllm.model_executor.layers.fused_moe.fused_moe.get_default_config": (
            "features/one_forward/engine_part/tiles.py",
            "Its tiles for batch invariance are slow for FP8.",
        ),
    },
)
register(
    REGISTERED,
    {
        "vllm.ir.ops.rms_norm": (
            "features/one_forward/engine_part/norms.py",
            "The same bits in every batch; on CPU its mean is FP64.",
        ),
        "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend": (
            "features/one_forward/engine_part/flash_attention.py",
            "Prefill and decode would run different kernels.",
        ),
    },
)
