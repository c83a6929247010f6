"""Warnings for values of mismatch and correction metrics at which runs lost accuracy, with advice.

The texts name what a user can change. The caller takes care that each is said once per run.
"""

from collections.abc import Mapping


MIN_EFFECTIVE_SAMPLE_SIZE = 0.7  # of tokens: runs below it lost the most accuracy, runs above it no measurable amount
MIN_SEQUENCE_EFFECTIVE_SAMPLE_SIZE = 0.3  # verl's rollout-correction docs
MAX_MASKED_SEQUENCES = 0.2
MAX_K3 = 0.1  # SmolLM2-135M without a fault has 0.064 at most (docs/evidence.md)


def health_warnings(metrics: Mapping[str, float], level: str | None, monitor_only: bool = False) -> dict[str, str]:
    """Return warnings about mismatch and correction metrics, by name. NaN (nothing measured) is not a warning.

    `level` and `monitor_only` are fields of the `RolloutCorrection`. The record itself is not taken, because a report
    of a run is made without torch.
    """
    warnings = {}
    sequence = level == "sequence"
    size = "correction/sequence_effective_sample_size" if sequence else "correction/effective_sample_size"
    least = MIN_SEQUENCE_EFFECTIVE_SAMPLE_SIZE if sequence else MIN_EFFECTIVE_SAMPLE_SIZE
    if metrics.get(size, 1.0) < least:
        warnings[size] = f"{size} = {metrics[size]:.3f} < {least}: " + (
            "a few sequences dominate the raw importance ratios. Use level='token' or 'geometric', and look for the "
            "cause in mismatch/k3_kl by position and length."
            if sequence
            else "a few tokens dominate the raw importance ratios. If that stays, a correction does not make up for "
            "it: look at mismatch/logp_difference_max and at mismatch/k3_kl by position and length, and compare with "
            "kv_cache_dtype='auto'."
        )
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
            "no token of this batch is trained on, the correction rejects or masks every one. Widen the rejection "
            "bands (centre='measured' for geometric_ratio) or use level='token', bound='truncate'."
        )
    elif metrics.get(masked, 0.0) > MAX_MASKED_SEQUENCES:
        warnings[masked] = (
            f"{masked} = {metrics[masked]:.2f} > {MAX_MASKED_SEQUENCES}: that share of sequences is generated and "
            "thrown away. For geometric_ratio use centre='measured' or a wider band; at level='sequence' use "
            "bound='truncate', or level='token'."
        )
    note = "Monitor only, so nothing was applied: " if monitor_only else ""
    return {name: note + text if name.startswith("correction/") else text for name, text in warnings.items()}
