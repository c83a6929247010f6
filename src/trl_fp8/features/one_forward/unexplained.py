"""Warnings about the parts of a mismatch that FP8 does not explain, and a note about the part that it does explain.

explanation.py measures the parts.
"""

from collections.abc import Mapping


EXPLAINED, UNEXPLAINED, SCORING = "mismatch/explained_k3", "mismatch/unexplained_k3", "mismatch/scoring_k3"
# On a CPU, shared kernels leave a k3 of 0. On a GPU, one forward allows a mean |log r| of 1e-3, a k3 of about 5e-7
MAX_UNEXPLAINED_K3 = 1e-6
# At an explained k3 of 0.006 no loss of learning was found, at 0.03 a loss was found (docs/evidence.md)
LARGE_EXPLAINED_K3 = 0.01
TEXTS = {
    UNEXPLAINED: (
        "unexplained mismatch. The engine's kernels on the policy's weights do not give the log-probs of the "
        "rollouts, so FP8 is not the cause. Usual causes: rollouts of older weights or KV scales, a prefix cache that "
        "was not reset, another temperature or sampling, token ids of another tokenizer or chat template on one side, "
        "wrong position ids in the policy, a plugin that changes the engine. Compare with kv_cache_dtype='auto' and "
        "without callbacks."
    ),
    SCORING: (
        "the trainer's log-probs are not those of its policy in evaluation mode, so FP8 is not the cause. Usual "
        "causes: dropout that is on (set disable_dropout=True, and lora_dropout=0), or a subclass that scores "
        "otherwise than TRL. The correction weighs this difference, too."
    ),
}


def mismatch_warnings(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return metric name -> warning, for each part above `MAX_UNEXPLAINED_K3` that FP8 does not explain.

    NaN means that a part was not measured, and gives no warning.
    """
    warnings = {}
    for name, text in TEXTS.items():
        value = metrics.get(name, 0.0)
        if value > MAX_UNEXPLAINED_K3:
            warnings[name] = f"{name} = {value:.3g} > {MAX_UNEXPLAINED_K3:g}: {text}"
    return warnings


def explained_note(metrics: Mapping[str, float]) -> str:
    """Return a note on the explained part and what lowers it; empty if it is at most `LARGE_EXPLAINED_K3` or NaN."""
    explained = metrics.get(EXPLAINED, 0.0)
    if not explained > LARGE_EXPLAINED_K3:  # written with `not`, because comparisons with NaN are false
        return ""
    dropout = "" if SCORING in metrics else " Dropout, if it is on, also adds to it here."
    return (
        f"{EXPLAINED} = {explained:.3g}: on the same weights, the policy's own forward differs by this much from the "
        f"engine's kernels. FP8 formats do that.{dropout} To lower it, keep layers in BF16 (fp8_ignored_modules), set "
        "kv_cache_dtype='auto' or kv_cache_skip_layers, or set fp8_forward='one_forward'."
    )
