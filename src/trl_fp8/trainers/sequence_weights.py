"""Correction of losses with one ratio for a whole sequence, as RLOO's and GMPO's.

These losses read no weights, but they are linear in the advantage of a sequence: min(r A, clip(r) A) w is
min(r w A, clip(r) w A) for w >= 0. So an advantage times w is the loss times w. A weight of one token has no place.
A KL penalty in the loss is not weighted, as in TRL's GRPO.
"""

from dataclasses import dataclass

import torch

from trl_fp8.config import FP8Config
from trl_fp8.run.batch import COMPLETION_MASK, TOOL_MASK


@dataclass
class SequenceConfig(FP8Config):
    """Base of the configs of these trainers: a correction weighs sequences, by default with a ratio of at most 2."""

    fp8_sampling_mode = "sequence_truncate"

    def __post_init__(self):
        super().__post_init__()
        correction = self.correction
        if correction is None or correction.monitor_only:
            return
        settings = ["level='token'"] if correction.level == "token" else []
        settings += [f"reject={rule.statistic!r}" for rule in correction.reject if rule.statistic == "token_ratio"]
        settings += ["denominator='shrink'"] if correction.denominator == "shrink" else []
        if settings:
            name = type(self).__name__
            raise ValueError(
                f"{name} with a rollout correction of {', '.join(settings)}: the loss has one ratio for a sequence, "
                "and takes no weight of a token. Use vllm_importance_sampling_mode='sequence_truncate' or "
                "'sequence_mask', a rollout_correction of level 'sequence' or 'geometric' that keeps its denominator, "
                "or rollout_correction='monitor', which only measures."
            )


class SequenceWeights:
    """Base of a trainer whose loss is linear in the advantages. It stands before TRL's trainer."""

    def _compute_loss(self, model, inputs: dict) -> torch.Tensor:
        # TRL's own ratio, with everything off, is one that TRL's loss ignores
        weights = inputs.get("importance_sampling_ratio") if self.args.correction is not None else None
        if weights is not None:
            if weights.shape[1] > 1:  # [B, T]: the same at all tokens that are trained, 1 at the others
                trained = inputs[COMPLETION_MASK] * inputs.get(TOOL_MASK, 1)
                weights = weights.gather(1, trained.argmax(1, keepdim=True))
            inputs = inputs | {"advantages": inputs["advantages"] * weights[:, 0]}
        return super()._compute_loss(model, inputs)
