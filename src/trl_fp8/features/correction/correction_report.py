"""What a correction did to a batch, as sums on the device and as metrics on the host.

Everything is counted against the tokens and sequences *before* rejection, so that a correction which drops most of a
batch reads as one that drops most of a batch. A token *contributes* if it is kept and its weight is not 0.
"""

from collections.abc import Mapping

import torch

from trl_fp8.run.metric import Metric, effective_sample_size, highest, lowest, mean_of

from .tally import Tally, highest_of, lowest_of


def correction_tally(
    mask_BT: torch.Tensor,  # tokens that are trained on, before rejection
    weights_BT: torch.Tensor,  # after bound and normalization
    keep_BT: torch.Tensor,  # tokens that all rejection rules accept
    keep_by: Mapping[str, torch.Tensor],  # tokens that each rule accepts
    counted_BT: torch.Tensor,  # tokens that the loss averages over
    counts: Mapping[str, torch.Tensor],  # units that a ratio was taken over, and those of them outside the bounds
    constants: Mapping[str, torch.Tensor],  # mean weight and log of the centre that were used, the same on every rank
) -> Tally:
    """Sums of one batch."""
    used_BT = torch.where(keep_BT, weights_BT, 0.0).double()
    contributes_BT = used_BT > 0
    sums = {
        "trained_tokens": mask_BT.sum(),
        "trained_sequences": mask_BT.any(dim=-1).sum(),
        "contributing_tokens": contributes_BT.sum(),
        "contributing_sequences": contributes_BT.any(dim=-1).sum(),
        "counted": counted_BT.sum(),
        "used": used_BT.sum(),
        "used_squared": used_BT.square().sum(),
        **{name: which.sum() for name, which in counts.items()},
        **{f"rejected_tokens.{name}": (mask_BT & ~kept_BT).sum() for name, kept_BT in keep_by.items()},
    }
    minima = {"weight_min": lowest_of(used_BT, counted_BT)}
    maxima = {"weight_max": highest_of(used_BT, counted_BT), **constants}  # constants are equal on all ranks
    return Tally.of(sums, minima, maxima)


def correction_metrics(sums: Mapping[str, float]) -> dict[str, Metric]:
    """Metrics from `Tally.read()` of a tally that contains `CorrectedRollout.report`. A fraction of nothing is NaN."""
    tokens, sequences = sums["trained_tokens"], sums["trained_sequences"]
    nothing_left = float(tokens > 0 and sums["contributing_tokens"] == 0)
    metrics = {
        "correction/fraction_clipped_high": mean_of(sums["clipped_high"], sums["units"]),
        "correction/fraction_clipped_low": mean_of(sums["clipped_low"], sums["units"]),
        "correction/fraction_masked_tokens": mean_of(tokens - sums["contributing_tokens"], tokens),
        "correction/fraction_masked_sequences": mean_of(sequences - sums["contributing_sequences"], sequences),
        "correction/all_rejected": mean_of(nothing_left),
        "correction/weight_min": lowest(sums["weight_min"]),
        "correction/weight_mean": mean_of(sums["used"], sums["counted"]),
        "correction/weight_max": highest(sums["weight_max"]),
        "correction/effective_sample_size_used": effective_sample_size(sums["used"], sums["used_squared"], tokens),
        "correction/batch_norm_factor": mean_of(sums["batch_norm_factor"]),
    }
    rejected = {name.partition(".")[2]: value for name, value in sums.items() if name.startswith("rejected_tokens.")}
    metrics |= {f"correction/fraction_rejected/{rule}": mean_of(count, tokens) for rule, count in rejected.items()}
    return metrics | ({"correction/log_centre": mean_of(sums["log_centre"])} if rejected else {})
