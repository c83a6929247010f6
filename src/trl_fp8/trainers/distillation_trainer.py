"""`FP8DistillationTrainer`: TRL's `DistillationTrainer` with FP8 rollouts."""

from dataclasses import dataclass
from functools import wraps
from inspect import signature

from trl import DistillationConfig, DistillationTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.rollouts import FP8Rollouts

from .distilling import Distilling, DistillingConfig


@documented
@dataclass
class FP8DistillationConfig(DistillingConfig, *groups_for(DistillationConfig), DistillationConfig):
    """Configuration of `FP8DistillationTrainer`: every field of `trl.DistillationConfig`, and the ones below."""

    # `DistillationConfig` lacks these two fields of `GRPOConfig`. TRL generates once for each optimizer step
    generation_batch_size = None

    @property
    def steps_per_generation(self) -> int:
        return self.gradient_accumulation_steps


class FP8DistillationTrainer(Distilling, FP8Rollouts, DistillationTrainer):
    """TRL's `DistillationTrainer` whose rollouts run in FP8. Takes exactly its arguments."""

    config_class = FP8DistillationConfig
    _tag_names = ["trl", "distillation", "fp8"]
    _name = "Distillation with FP8 rollouts"
    num_iterations = 1  # optimizer steps on a batch of rollouts

    @wraps(DistillationTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(**signature(DistillationTrainer).bind(*args, **kwargs).arguments)
