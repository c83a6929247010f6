"""The log-ratio of one rollout batch, which correction and mismatch are both computed from.

    log r_t = log pi_trainer(t) - log pi_rollout(t)        r > 1: the trainer likes the token more than the engine did

A token is *scored* if both sides gave it a usable log-prob. An unscored token has log r = 0 (no correction) and is
counted, so that it is neither a NaN in the loss nor a silent zero in an average. Bounds are of r, never of 1/r.

Shapes: B sequences, T completion tokens.
"""

from dataclasses import dataclass

import torch


# exp(20) = 4.9e8 is no ratio of two trained models. The bound keeps sums of squares finite (exp(40) = 2.4e17).
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LogRatio:
    """Per-token log-ratios of a batch, without gradient."""

    values_BT: torch.Tensor  # log r clamped to +-LOG_RATIO_BOUND; 0 where not scored; fp32, or fp64 if an input is
    mask_BT: torch.Tensor  # bool: the tokens that are trained on, before any rejection
    scored_BT: torch.Tensor  # bool: trained on and both log-probs usable
    missing_BT: torch.Tensor  # bool: trained on, but the rollout log-prob is NaN or infinite
    broken_BT: torch.Tensor  # bool: the rollout log-prob is fine, but the trainer's is NaN or +inf
    clamped_BT: torch.Tensor  # bool: scored, and |log r| was beyond the bound
    trainer_BT: torch.Tensor  # log-probs of the trainer as given, in the dtype of `values_BT`
    rollout_BT: torch.Tensor  # log-probs of the engine as given, likewise

    @property
    def has_evidence_B1(self) -> torch.Tensor:
        return self.scored_BT.any(dim=-1, keepdim=True)

    def mean_over_sequence_B1(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Mean over the scored tokens of each sequence, of values that are 0 elsewhere; 0 where none is scored."""
        return values_BT.sum(dim=-1, keepdim=True) / self.scored_BT.sum(dim=-1, keepdim=True).clamp(min=1)


def log_ratio(trainer_logps_BT: torch.Tensor, rollout_logps_BT: torch.Tensor, mask_BT: torch.Tensor) -> LogRatio:
    """Compare the log-probs that trainer and engine gave to the same sampled tokens.

    Args:
        trainer_logps_BT: -inf is a ratio of (nearly) zero; NaN and +inf are failures of the forward, left unscored.
        rollout_logps_BT: What is not finite counts as missing: a sampled token cannot have probability zero.
        mask_BT: Nonzero at the tokens that are trained on. What the log-probs hold elsewhere does not matter.
    """
    shapes = [tuple(x.shape) for x in (trainer_logps_BT, rollout_logps_BT, mask_BT)]
    if len(shapes[0]) != 2 or len(set(shapes)) != 1:
        raise ValueError(
            f"trainer_logps, rollout_logps and mask have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}: a ratio "
            "needs one log-prob from each side for every token. Pass three tensors of the same shape [B, T]."
        )
    dtype = torch.promote_types(torch.promote_types(trainer_logps_BT.dtype, rollout_logps_BT.dtype), torch.float32)
    trainer, rollout = trainer_logps_BT.detach().to(dtype), rollout_logps_BT.detach().to(dtype)
    mask = mask_BT.bool()

    missing = mask & ~torch.isfinite(rollout)
    scored = mask & ~missing & (trainer < torch.inf)  # False for NaN and +inf, True for -inf
    difference = torch.where(scored, trainer - rollout, 0.0)
    values = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return LogRatio(
        values_BT=values,
        mask_BT=mask,
        scored_BT=scored,
        missing_BT=missing,
        broken_BT=mask & ~missing & ~scored,
        clamped_BT=difference != values,
        trainer_BT=trainer,
        rollout_BT=rollout,
    )
