"""`FP8RLOOTrainer`: TRL's `RLOOTrainer` with FP8 rollouts. It keeps the engine's log-probs, which TRL drops."""

from dataclasses import dataclass
from functools import wraps
from inspect import signature

import torch
from trl import RLOOConfig, RLOOTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.rollouts import FP8Rollouts
from trl_fp8.run.batch import COMPLETION_MASK, ROLLOUT_LOGPS, TRAINER_LOGPS

from .compared import Compared, ComparedFlags
from .sequence_weights import SequenceConfig, SequenceWeights


@dataclass
class _ComparedConfig(ComparedFlags, RLOOConfig):
    """TRL's `RLOOConfig` with the flags of a rollout correction."""

    loss_type = None  # a plain attribute, no field: RLOO has one loss, but shared code reads args.loss_type


@documented
@dataclass
class FP8RLOOConfig(SequenceConfig, *groups_for(_ComparedConfig), _ComparedConfig):
    """Configuration of `FP8RLOOTrainer`: every field of `trl.RLOOConfig`, and the ones below."""

    @property
    def own_engine(self) -> bool:
        return super().own_engine or self.correction is not None


class _ComparedRLOO(RLOOTrainer):
    """TRL's `RLOOTrainer` whose batch has the log-probs of trainer and engine, under the keys of TRL's GRPO."""

    # Log-probs `[B, T]` of each pass over the current generation; None outside of `_generate_and_score_completions`
    _logps_of_passes: list[torch.Tensor] | None = None

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        self._logps_of_passes = []
        tensors = super()._generate_and_score_completions(inputs)
        if self.compared:
            trainer_logps = self._logps_of_passes[0]  # TRL scores with the policy first, then with the reference
            tensors |= {TRAINER_LOGPS: trainer_logps, ROLLOUT_LOGPS: self.rollout_logps(trainer_logps)}
        self._logps_of_passes = None
        return tensors

    def _get_per_token_logps_and_entropies(self, *args, **kwargs) -> tuple:
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._logps_of_passes is not None:
            self._logps_of_passes.append(output[0])  # output: log-probs, entropies
        return output

    def _compute_loss(self, model, inputs: dict) -> torch.Tensor:
        correction = self.args.correction
        if correction is not None and correction.bypass:
            # With bypass the correction has put the rollouts' log-probs under TRAINER_LOGPS. RLOO reads their sums
            # under another key, which TRL filled before the correction
            old_logps = (inputs[TRAINER_LOGPS] * inputs[COMPLETION_MASK]).sum(1)
            inputs = inputs | {"old_logps": old_logps}
        return super()._compute_loss(model, inputs)


class FP8RLOOTrainer(SequenceWeights, Compared, FP8Rollouts, _ComparedRLOO):
    """TRL's `RLOOTrainer` whose rollouts run in FP8. Takes exactly the arguments of `trl.RLOOTrainer`.

    Raises:
        ValueError: `args` is not an `FP8RLOOConfig`, or the model or launcher does not go with its FP8 flags.
    """

    config_class = FP8RLOOConfig
    _tag_names = ["trl", "rloo", "fp8"]
    _name = "RLOO with FP8 rollouts"

    @wraps(RLOOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(**signature(RLOOTrainer).bind(*args, **kwargs).arguments)
