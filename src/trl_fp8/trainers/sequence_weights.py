"""Rollout correction for losses with one ratio for a whole sequence: those of RLOO and GMPO.

These losses read no correction weights, but they are linear in the advantage of a sequence: min(r A, clip(r) A) w is
min(r w A, clip(r) w A) for w >= 0. So the advantage is multiplied by the correction weight w, which must be the same
for all tokens of a sequence. A KL penalty in the loss is not weighted, as in TRL's GRPO.
"""

from dataclasses import dataclass

import torch

from trl_fp8.config import FP8Config
from trl_fp8.run.batch import COMPLETION_MASK, TOOL_MASK


@dataclass
class SequenceConfig(FP8Config):
    """Base of the configs of RLOO and GMPO. By default a correction clips the ratio of a sequence at 2."""

    fp8_sampling_mode = "sequence_truncate"

    def __post_init__(self):
        super().__post_init__()
        correction = self.correction
        if correction is None or correction.monitor_only:
            return
        settings = []  # settings of the correction that need a weight for each token
        if correction.level == "token":
            settings.append("level='token'")
        for rule in correction.reject:
            if rule.statistic == "token_ratio":
                settings.append(f"reject={rule.statistic!r}")
        if correction.denominator == "shrink":
            settings.append("denominator='shrink'")
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
        # Without a correction TRL may have put its own ratio under this key, which these losses ignore. The key is a
        # literal, because features/correction looks for it in the method's code to know that the loss reads weights
        weights = None
        if self.args.correction is not None:
            weights = inputs.get("importance_sampling_ratio")
        if weights is not None:
            if weights.shape[1] > 1:  # [B, T]: one value at all trained tokens of a sequence, 1 at other tokens
                trained = inputs[COMPLETION_MASK] * inputs.get(TOOL_MASK, 1)
                first_trained = trained.argmax(1, keepdim=True)
                weights = weights.gather(1, first_trained)
            inputs = inputs | {"advantages": inputs["advantages"] * weights[:, 0]}
        return super()._compute_loss(model, inputs)
