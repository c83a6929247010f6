"""What a correction did to a batch, as sums on the device and as metrics on the host.

Everything is counted against the tokens and sequences *before* rejection, so that a correction which drops most of a
batch reads as one that drops most of a batch. A token *contributes* if it is kept and its weight is not 0.
"""

from collections.abc import Mapping

import torch

from .tally import Tally


def correction_tally(
    mask_BT: torch.Tensor,  # tokens that are trained on, before rejection
    weights_BT: torch.Tensor,  # after bound and normalization
    keep_BT: torch.Tensor,  # tokens that all rejection rules accept
    keep_by: Mapping[str, torch.Tensor],  # tokens that each rule accepts
    counts: Mapping[str, torch.Tensor],  # units that a ratio was taken over, and those of them outside the bounds
    constants: Mapping[str, torch.Tensor],  # mean weight and log of the centre that were used, the same on every rank
) -> Tally:
    """Sums of one batch."""
    used_BT = torch.where(keep_BT, weights_BT, 0.0).double()
    contributes_BT = used_BT > 0
    sums = {
        "tokens": mask_BT.sum(),
        "sequences": mask_BT.any(dim=-1).sum(),
        "contributing_tokens": contributes_BT.sum(),
        "contributing_sequences": contributes_BT.any(dim=-1).sum(),
        "weight": torch.where(mask_BT, weights_BT, 0.0).sum(dtype=torch.float64),
        "used": used_BT.sum(),
        "used_squared": used_BT.square().sum(),
        **{name: which.sum() for name, which in counts.items()},
        **{f"rejected_tokens.{name}": (mask_BT & ~kept_BT).sum() for name, kept_BT in keep_by.items()},
    }
    sums, constants = ({f"correction.{name}": value for name, value in group.items()} for group in (sums, constants))
    return Tally.of(sums, maxima=constants)  # merging equal values by maximum changes nothing


def correction_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics from `Tally.read()` of a tally that contains `CorrectedRollout.report`. A fraction of nothing is NaN."""
    own = {name.removeprefix("correction."): value for name, value in sums.items() if name.startswith("correction.")}

    def fraction(part: str, whole: str = "tokens") -> float:
        return own[part] / own[whole] if own[whole] else float("nan")

    tokens, used_squared = own["tokens"], own["used_squared"]
    used = own["used"] ** 2 / (tokens * used_squared) if used_squared else 0.0 if tokens else float("nan")
    metrics = {
        "correction/fraction_clipped_high": fraction("clipped_high", "units"),
        "correction/fraction_clipped_low": fraction("clipped_low", "units"),
        "correction/fraction_masked_tokens": 1 - fraction("contributing_tokens"),
        "correction/fraction_masked_sequences": 1 - fraction("contributing_sequences", "sequences"),
        "correction/all_rejected": float(tokens > 0 and own["contributing_tokens"] == 0),
        "correction/weight_mean": fraction("weight"),
        "correction/effective_sample_size_used": used,
        "correction/batch_norm_factor": own["batch_norm_factor"],
    }
    rejected = {name.partition(".")[2]: fraction(name) for name in own if name.startswith("rejected_tokens.")}
    metrics |= {f"correction/fraction_rejected/{statistic}": share for statistic, share in rejected.items()}
    return metrics | ({"correction/log_centre": own["log_centre"]} if rejected else {})
