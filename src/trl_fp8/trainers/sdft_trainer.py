"""`FP8SDFTTrainer`: TRL's `SDFTTrainer` with FP8 rollouts."""

from dataclasses import dataclass
from functools import wraps
from inspect import signature

from trl.experimental.sdft import SDFTConfig, SDFTTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.rollouts import FP8Rollouts

from .distilling import SelfDistillation, SelfDistillationConfig


@documented
@dataclass
class FP8SDFTConfig(SelfDistillationConfig, *groups_for(SDFTConfig), SDFTConfig):
    """Configuration of `FP8SDFTTrainer`: every field of `trl.experimental.sdft.SDFTConfig`, and the ones below."""


class FP8SDFTTrainer(SelfDistillation, FP8Rollouts, SDFTTrainer):
    """TRL's `SDFTTrainer` whose rollouts run in FP8. Takes exactly its arguments."""

    config_class = FP8SDFTConfig
    _tag_names = ["trl", "sdft", "fp8"]
    _name = "SDFT with FP8 rollouts"

    @wraps(SDFTTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(**signature(SDFTTrainer).bind(*args, **kwargs).arguments)
