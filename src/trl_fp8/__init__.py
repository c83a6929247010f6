"""FP8 rollouts for TRL's `GRPOTrainer`: quantized at every step, audited after every sync, corrected in the loss."""

from .config import FP8GRPOConfig
from .numerics.importance import RolloutCorrection
from .recipe import FP8Recipe
from .trainer import FP8GRPOTrainer


__all__ = ["FP8GRPOConfig", "FP8GRPOTrainer", "FP8Recipe", "RolloutCorrection"]
__version__ = "0.1.0.dev0"
