"""`FP8GMPOTrainer`: TRL's `GMPOTrainer` with FP8 rollouts."""

from dataclasses import dataclass

from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.trainer import FP8GRPOTrainer

from .sequence_weights import SequenceConfig, SequenceWeights


@documented
@dataclass
class FP8GMPOConfig(SequenceConfig, *groups_for(GMPOConfig), GMPOConfig):
    """Configuration of `FP8GMPOTrainer`: every field of `trl.experimental.gmpo.GMPOConfig`, and the ones below."""


class FP8GMPOTrainer(SequenceWeights, FP8GRPOTrainer, GMPOTrainer):
    """TRL's `GMPOTrainer` whose rollouts run in FP8. Takes the arguments of `trl.GRPOTrainer`."""

    config_class = FP8GMPOConfig
    _tag_names = ["trl", "gmpo", "fp8"]
    _name = "GMPO with FP8 rollouts"
