"""Whether a full FP8 forward does what it is for: next to no mismatch in the rollouts of a step.

The flow reproduces an engine's roundings module by module, which was shown for the model types below. Where a model
computes something that no module shows (a product in its own forward, another rotary embedding), or where kernels add
in another order, it goes on without an error, as slow as a flow and no nearer to the engine than without one.
"""

# Shown by tests/engine/test_precision_flow.py, and with FP8 experts by tests/engine/test_experts.py
VERIFIED = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
VERIFIED_WITH_FP8_EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
# Mean |log-prob difference|. BF16 rollouts of two layers leave 3e-3 (benchmarks/results/mismatch_ladder_cpu.json), a
# flow that holds at most 1e-5
LIMIT = 1e-3


def flow_warning(
    mismatch: float, model_type: str, *, adapters: bool = False, kv_cache_left_out: bool = False
) -> str | None:
    """What a user should know about a full flow whose latest rollouts show `mismatch`, a mean |log-prob difference|
    over completion tokens (NaN: nothing was measured). None if the flow holds.
    """
    if not mismatch > LIMIT:
        return None
    known = VERIFIED + VERIFIED_WITH_FP8_EXPERTS
    if kv_cache_left_out:
        reason = "simulate_kv_cache=False leaves out what the FP8 KV cache rounds: set it to True."
    elif adapters:
        reason = "The engine quantizes the sum of base and adapters, the trainer the base alone."
    elif model_type in known:
        reason = (
            f"On CPU this model type ({model_type}) was shown to be followed, with FP8 experts where it has experts. "
            "GPU kernels round in other places, and modules that stay in BF16 add in another order, which "
            "grows with depth."
        )
    else:
        reason = (
            f"model_type={model_type!r} is not one of those that were shown to be followed "
            f"({', '.join(sorted(known))}): it rounds somewhere that the flow does not know."
        )
    return (
        f"fp8_forward='full', but the mean difference of log-probs of the latest rollouts is {mismatch:.2g}, where "
        f"a flow that holds leaves less than {LIMIT:g}. {reason} Rollout correction works as without the flow; "
        "fp8_forward='off' is faster and may be as near (compare mismatch/logp_difference_mean)."
    )
