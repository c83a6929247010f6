"""When a mismatch or correction metric has left the range in which others trained stably, and what to try then.

The text is what a user can change. Saying it once per run is the caller's business.
"""

from collections.abc import Mapping


MIN_EFFECTIVE_SAMPLE_SIZE = 0.3  # verl's rollout-correction docs
MAX_TOKEN_MULT_PROB_ERROR = 1.05  # NeMo-RL plots a sample beyond this
MAX_MASKED_SEQUENCES = 0.2


def health_warnings(metrics: Mapping[str, float], level: str | None, monitor_only: bool = False) -> dict[str, str]:
    """Warnings about any of the mismatch and correction metrics, by name. NaN (nothing measured) is not a warning.

    `level` and `monitor_only` are those of the `RolloutCorrection`, which itself would bring torch along: a report of
    a run does without.
    """
    warnings = {}
    sequence = level == "sequence"
    size = "correction/sequence_effective_sample_size" if sequence else "correction/effective_sample_size"
    if metrics.get(size, 1.0) < MIN_EFFECTIVE_SAMPLE_SIZE:
        warnings[size] = (
            f"{size} = {metrics[size]:.3f} < {MIN_EFFECTIVE_SAMPLE_SIZE}: a few "
            f"{'sequences' if sequence else 'tokens'} dominate the raw importance ratios. "
            + ("Use level='token' or 'geometric'" if sequence else "Lower bound_max, or add a token_veto")
            + ", and look for the cause in mismatch/k3_kl by position and length."
        )
    error = "mismatch/token_mult_prob_error"
    if metrics.get(error, 1.0) > MAX_TOKEN_MULT_PROB_ERROR:
        warnings[error] = (
            f"{error} = {metrics[error]:.3f} > {MAX_TOKEN_MULT_PROB_ERROR}: engine and trainer disagree. "
            "Single batches of a small or barely trained model reach this with FP8 rollouts; if it "
            "stays or grows, look at mismatch/k3_kl by position, compare with kv_cache_dtype='auto', or keep outlier "
            "layers in high precision (fp8_ignored_modules)."
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
