"""`FP8SDPOTrainer`: TRL's `SDPOTrainer` with FP8 rollouts."""

from dataclasses import dataclass
from functools import wraps
from inspect import signature

from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.rollouts import FP8Rollouts

from .unscored import SelfDistillation, UnscoredConfig


@dataclass
class FP8SDPOConfig(UnscoredConfig, *groups_for(SDPOConfig), SDPOConfig):
    """Configuration of `FP8SDPOTrainer`: every field of `trl.experimental.sdpo.SDPOConfig`, and the ones below."""

    _VALID_DICT_FIELDS = SDPOConfig._VALID_DICT_FIELDS + [
        name for group in groups_for(SDPOConfig) for name in group.AS_JSON
    ]


FP8SDPOConfig.__doc__ = documented(FP8SDPOConfig, SDPOConfig)


class FP8SDPOTrainer(SelfDistillation, FP8Rollouts, SDPOTrainer):
    """TRL's `SDPOTrainer` whose rollouts run in FP8. Takes exactly its arguments."""

    config_class = FP8SDPOConfig
    _tag_names = ["trl", "sdpo", "fp8"]
    _name = "SDPO with FP8 rollouts"

    @wraps(SDPOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(**signature(SDPOTrainer).bind(*args, **kwargs).arguments)
