"""What a correction did to a batch, as sums on the device and as metrics on the host.

Everything is counted against the tokens and sequences *before* rejection, so that a correction which drops most of a
batch reads as one that drops most of a batch. A token *contributes* if it is kept and its weight is not 0.
"""

from collections.abc import Mapping

import torch

from .tally import Tally


_REJECTED = "correction.rejected_tokens."


def correction_tally(
    mask_BT: torch.Tensor,
    is_unit: torch.Tensor,
    outside: tuple[torch.Tensor, torch.Tensor],
    weights_BT: torch.Tensor,
    keep_BT: torch.Tensor,
    keep_by: Mapping[str, torch.Tensor],
    mean_weight: torch.Tensor,
    log_centre: torch.Tensor,
) -> Tally:
    """Sums of one batch.

    Args:
        mask_BT: Tokens that are trained on, before rejection.
        is_unit: What the ratio was taken over: scored tokens [B, T], or sequences with a scored token [B, 1].
        outside: Raw ratios above and below the bounds, in `is_unit`'s shape.
        weights_BT: Weights after bound and normalization.
        keep_BT: Tokens that all rejection rules accept.
        keep_by: For each rule, the tokens it accepts.
        mean_weight: What the weights were divided by.
        log_centre: Log of the centre that `centre="measured"` rules used.
    """
    too_high, too_low = outside
    used_BT = torch.where(keep_BT, weights_BT, 0.0).double()
    contributes_BT = used_BT > 0
    sums = {
        "correction.tokens": mask_BT.sum(),
        "correction.sequences": mask_BT.any(dim=-1).sum(),
        "correction.units": is_unit.sum(),
        "correction.clipped_high": (too_high & is_unit).sum(),
        "correction.clipped_low": (too_low & is_unit).sum(),
        "correction.contributing_tokens": contributes_BT.sum(),
        "correction.contributing_sequences": contributes_BT.any(dim=-1).sum(),
        "correction.weight": torch.where(mask_BT, weights_BT, 0.0).sum(dtype=torch.float64),
        "correction.used": used_BT.sum(),
        "correction.used_squared": used_BT.square().sum(),
    }
    sums |= {_REJECTED + name: (mask_BT & ~kept_BT).sum() for name, kept_BT in keep_by.items()}
    # the same on every rank, so merging by maximum changes nothing
    return Tally.of(sums, maxima={"correction.batch_norm_factor": mean_weight, "correction.log_centre": log_centre})


def correction_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of `CorrectedRollout.report` after it was gathered and read.

    Fractions are of the tokens and sequences before rejection. A fraction of nothing is NaN.

    Args:
        sums: `Tally.read()` of a tally that contains the report.
    """

    def fraction(part: str, whole: str) -> float:
        return sums[part] / sums[whole] if sums[whole] else float("nan")

    tokens, used_squared = sums["correction.tokens"], sums["correction.used_squared"]
    metrics = {
        "correction/fraction_clipped_high": fraction("correction.clipped_high", "correction.units"),
        "correction/fraction_clipped_low": fraction("correction.clipped_low", "correction.units"),
        "correction/fraction_masked_tokens": 1 - fraction("correction.contributing_tokens", "correction.tokens"),
        "correction/fraction_masked_sequences": 1
        - fraction("correction.contributing_sequences", "correction.sequences"),
        "correction/all_rejected": float(tokens > 0 and sums["correction.contributing_tokens"] == 0),
        "correction/weight_mean": fraction("correction.weight", "correction.tokens"),
        "correction/effective_sample_size_used": (
            sums["correction.used"] ** 2 / (tokens * used_squared) if used_squared else 0.0 if tokens else float("nan")
        ),
        "correction/batch_norm_factor": sums["correction.batch_norm_factor"],
    }
    rejected = [name for name in sums if name.startswith(_REJECTED)]
    for name in rejected:
        metrics[f"correction/fraction_rejected/{name.removeprefix(_REJECTED)}"] = fraction(name, "correction.tokens")
    if rejected:
        metrics["correction/log_centre"] = sums["correction.log_centre"]
    return metrics
