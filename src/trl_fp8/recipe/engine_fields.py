"""What vLLM's classes look up in a config, and transformers' classes, which do the same whatever it says, do not.

Checkpoints of the hub have these fields. A config that was made in memory may lack them, or say otherwise: what is
trained is what transformers computes.
"""

from collections.abc import Mapping
from typing import Any


# vLLM would round the logits of routers to BF16; transformers computes these in FP32
_SIGMOID_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_router_dtype": "float32"}


def engine_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields for an engine to have over a text `config`, as `to_dict()` gives it; of most model types none.

    Raises:
        ValueError: What the config says no class of vLLM computes.
    """
    kind, get = config.get("model_type"), config.get
    if kind in ("deepseek_v3", "glm4_moe_lite") and not get("rope_interleave", True):
        raise ValueError(
            f"models of type {kind!r} with rope_interleave=False: vLLM's class turns neighbouring channels, whatever "
            "the config says. Choose a checkpoint with rope_interleave=True."
        )
    if kind == "deepseek_v2":
        one_group = {"n_group": 1, "topk_group": 1} if get("topk_method") == "greedy" else {}
        return one_group | {"scoring_func": "softmax", "norm_topk_prob": False, "moe_router_dtype": "float32"}
    if kind == "deepseek_v3":
        return dict(_SIGMOID_ROUTER)
    if kind == "glm4_moe_lite":
        return {"first_k_dense_replace": [*get("mlp_layer_types"), "sparse"].index("sparse")}
    if kind == "minimax_m2":
        rotated = (get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) * get("head_dim")
        return {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": int(rotated)}
    return {}
