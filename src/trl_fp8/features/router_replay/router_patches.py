"""What router replay patches in other libraries."""

from trl_fp8.upstream.patches import ON_INSTANCES, register


register(
    ON_INSTANCES,
    {
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter": (
            "features/router_replay/replay.py",
            "The class of routers, this one and its like: they take no choice.",
        ),
    },
)
