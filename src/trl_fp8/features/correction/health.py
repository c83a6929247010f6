"""Warnings, with advice, for values of mismatch and correction metrics at which runs lost accuracy.

A caller shows each warning once per run.
"""

from collections.abc import Mapping


MIN_EFFECTIVE_SAMPLE_SIZE = 0.7  # of tokens: runs below it lost the most accuracy, runs above it lost none measurably
MIN_SEQUENCE_EFFECTIVE_SAMPLE_SIZE = 0.3  # verl's rollout-correction docs
MAX_MASKED_SEQUENCES = 0.2
MAX_K3 = 0.1  # SmolLM2-135M without a fault has 0.064 at most (docs/evidence.md)


def health_warnings(metrics: Mapping[str, float], level: str | None, monitor_only: bool = False) -> dict[str, str]:
    """Return warnings about mismatch and correction metrics, by the metric's name. NaN gives no warning.

    `level` and `monitor_only` are fields of the `RolloutCorrection`. The correction itself is no argument, because its
    module imports torch, and a report of a run is made without torch.
    """
    warnings = {}
    if level == "sequence":
        name = "correction/sequence_effective_sample_size"
        least = MIN_SEQUENCE_EFFECTIVE_SAMPLE_SIZE
        advice = (
            "a few sequences dominate the raw importance ratios. Use level='token' or 'geometric', and look for the "
            "cause in mismatch/k3_kl by position and length."
        )
    else:
        name = "correction/effective_sample_size"
        least = MIN_EFFECTIVE_SAMPLE_SIZE
        advice = (
            "a few tokens dominate the raw importance ratios. If that stays, a correction does not make up for it: "
            "look at mismatch/logp_difference_max and at mismatch/k3_kl by position and length, and compare with "
            "kv_cache_dtype='auto'."
        )
    if metrics.get(name, 1.0) < least:
        warnings[name] = f"{name} = {metrics[name]:.3f} < {least}: {advice}"
    k3 = "mismatch/k3_kl"
    if metrics.get(k3, 0.0) > MAX_K3:
        warnings[k3] = (
            f"{k3} = {metrics[k3]:.3g} > {MAX_K3}: SmolLM2-135M with 30 layers and no fault had at most 0.064. If "
            "mismatch/unexplained_k3 is logged, it says whether this is a fault. If it is not, compare with "
            "kv_cache_dtype='auto' and with BF16 rollouts (fp8_weights=False)."
        )
    masked = "correction/fraction_masked_sequences"
    if metrics.get("correction/all_rejected", 0.0) > 0.5:
        warnings["correction/all_rejected"] = (
            "no token of this batch is trained on: the correction rejects or masks every one. Widen the rejection "
            "bands (centre='measured' for geometric_ratio) or use level='token', bound='truncate'."
        )
    elif metrics.get(masked, 0.0) > MAX_MASKED_SEQUENCES:
        warnings[masked] = (
            f"{masked} = {metrics[masked]:.2f} > {MAX_MASKED_SEQUENCES}: this share of the generated sequences is "
            "thrown away. For geometric_ratio use centre='measured' or a wider band; at level='sequence' use "
            "bound='truncate', or level='token'."
        )
    if monitor_only:
        for name, text in warnings.items():
            if name.startswith("correction/"):
                warnings[name] = f"Monitor only, so nothing was applied: {text}"
    return warnings
