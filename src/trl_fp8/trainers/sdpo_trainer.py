"""`FP8SDPOTrainer`: TRL's `SDPOTrainer` with FP8 rollouts."""

from dataclasses import dataclass
from functools import wraps
from inspect import signature

import torch
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.rollouts import FP8Rollouts
from trl_fp8.run.batch import COMPLETION_MASK, LOSS_WEIGHTS, ROLLOUT_LOGPS, TOOL_MASK, TRAINER_LOGPS
from trl_fp8.run.feature import flag

from .compared import Compared, ComparedFlags
from .distilling import SelfDistillation, SelfDistillationConfig


@dataclass
class _ComparedConfig(ComparedFlags, SDPOConfig):
    """TRL's `SDPOConfig` with the flags of a correction."""

    vllm_importance_sampling_correction: bool | None = flag(
        None,
        "Whether to compare log-probs of engine and policy, and to correct the policy loss, if anything is FP8 or "
        "`rollout_correction` is set. Not set: True with a policy loss (`distillation_weight` < 1) or a "
        "`rollout_correction`.",
    )


@documented
@dataclass
class FP8SDPOConfig(SelfDistillationConfig, *groups_for(_ComparedConfig), _ComparedConfig):
    """Configuration of `FP8SDPOTrainer`: every field of `trl.experimental.sdpo.SDPOConfig`, and the ones below."""

    def __post_init__(self):
        if self.vllm_importance_sampling_correction is None:
            self.vllm_importance_sampling_correction = (
                self.distillation_weight < 1 or self.rollout_correction is not None
            )
        super().__post_init__()
        if self.compared and self.truncated_by:
            settings = ", ".join(f"{name}={value!r}" for name, value in self.truncated_by.items())
            raise ValueError(
                f"{settings} with {type(self).__name__} and vllm_importance_sampling_correction=True: the engine's "
                "log-probs are normalized over the tokens that survive, those of SDPO's loss over all tokens. Set "
                "top_p=1.0, top_k=0, min_p=None, or vllm_importance_sampling_correction=False."
            )

    @property
    def compared(self) -> bool:
        return self.own_engine and self.vllm_importance_sampling_correction

    @property
    def own_engine(self) -> bool:
        """Return True also with a correction: TRL's SDPO requests no log-probs from its own engine."""
        return super().own_engine or self.correction is not None


class FP8SDPOTrainer(SelfDistillation, Compared, FP8Rollouts, SDPOTrainer):
    """TRL's `SDPOTrainer` whose rollouts run in FP8. Takes exactly its arguments.

    The policy loss (`distillation_weight` < 1) is linear in the advantages, which may have a value for each token.
    They are multiplied by the correction weights. The distillation loss compares two models, and is not corrected.
    """

    config_class = FP8SDPOConfig
    _tag_names = ["trl", "sdpo", "fp8"]
    _name = "SDPO with FP8 rollouts"

    @wraps(SDPOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(**signature(SDPOTrainer).bind(*args, **kwargs).arguments)

    def sample_rollouts(self, inputs: list[dict]) -> dict:
        batch = super().sample_rollouts(inputs)
        if self.compared:
            batch[ROLLOUT_LOGPS] = self.rollout_logps(batch[TRAINER_LOGPS])
        return batch

    def _compute_policy_loss(self, inputs: dict, student_logits: torch.Tensor) -> torch.Tensor:
        if self.args.correction is not None:
            # SDPO has no tools, so only a correction with denominator="shrink" sets TOOL_MASK: 0 at padding and at
            # tokens that it rejected. SDPO's loss reads COMPLETION_MASK alone
            counted = inputs.get(TOOL_MASK, inputs[COMPLETION_MASK])
            weighted = inputs["advantages"][:, None] * inputs[LOSS_WEIGHTS]
            inputs = inputs | {"advantages": weighted, COMPLETION_MASK: counted}
        return super()._compute_policy_loss(inputs, student_logits)
