"""FP8 rollouts for TRL's `GRPOTrainer`: quantized at every step, audited after every sync, corrected in the loss."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .config import FP8GRPOConfig
    from .engine.vllm.sync_audit import SyncAuditCallback
    from .recipe.recipe import FP8Recipe
    from .rollouts import FP8Rollouts
    from .run.progress import FP8ProgressCallback
    from .trainer import FP8GRPOTrainer
    from .trainers.async_grpo_trainer import FP8AsyncGRPOConfig, FP8AsyncGRPOTrainer
    from .trainers.distillation_trainer import FP8DistillationConfig, FP8DistillationTrainer
    from .trainers.gmpo_trainer import FP8GMPOConfig, FP8GMPOTrainer
    from .trainers.gold_trainer import FP8GOLDConfig, FP8GOLDTrainer
    from .trainers.iw_opd_trainer import FP8IWOPDConfig, FP8IWOPDTrainer
    from .trainers.rloo_trainer import FP8RLOOConfig, FP8RLOOTrainer
    from .trainers.sdft_trainer import FP8SDFTConfig, FP8SDFTTrainer
    from .trainers.sdpo_trainer import FP8SDPOConfig, FP8SDPOTrainer

__all__ = [
    "FP8AsyncGRPOConfig",
    "FP8AsyncGRPOTrainer",
    "FP8SDPOConfig",
    "FP8SDPOTrainer",
    "FP8SDFTConfig",
    "FP8SDFTTrainer",
    "FP8DistillationConfig",
    "FP8DistillationTrainer",
    "FP8GMPOConfig",
    "FP8GMPOTrainer",
    "FP8GOLDConfig",
    "FP8GOLDTrainer",
    "FP8GRPOConfig",
    "FP8GRPOTrainer",
    "FP8IWOPDConfig",
    "FP8IWOPDTrainer",
    "FP8ProgressCallback",
    "FP8RLOOConfig",
    "FP8RLOOTrainer",
    "FP8Recipe",
    "FP8Rollouts",
    "SyncAuditCallback",
]
__version__ = "0.1.0.dev0"

_HOME = {  # public name -> module that defines it
    "FP8AsyncGRPOConfig": ".trainers.async_grpo_trainer",
    "FP8AsyncGRPOTrainer": ".trainers.async_grpo_trainer",
    "FP8SDPOConfig": ".trainers.sdpo_trainer",
    "FP8SDPOTrainer": ".trainers.sdpo_trainer",
    "FP8SDFTConfig": ".trainers.sdft_trainer",
    "FP8SDFTTrainer": ".trainers.sdft_trainer",
    "FP8DistillationConfig": ".trainers.distillation_trainer",
    "FP8DistillationTrainer": ".trainers.distillation_trainer",
    "FP8GMPOConfig": ".trainers.gmpo_trainer",
    "FP8GMPOTrainer": ".trainers.gmpo_trainer",
    "FP8GOLDConfig": ".trainers.gold_trainer",
    "FP8GOLDTrainer": ".trainers.gold_trainer",
    "FP8IWOPDConfig": ".trainers.iw_opd_trainer",
    "FP8IWOPDTrainer": ".trainers.iw_opd_trainer",
    "FP8GRPOConfig": ".config",
    "FP8GRPOTrainer": ".trainer",
    "FP8ProgressCallback": ".run.progress",
    "FP8RLOOConfig": ".trainers.rloo_trainer",
    "FP8RLOOTrainer": ".trainers.rloo_trainer",
    "FP8Recipe": ".recipe.recipe",
    "FP8Rollouts": ".rollouts",
    "SyncAuditCallback": ".engine.vllm.sync_audit",
}


def __getattr__(name: str) -> object:
    """Import a public name on its first use: importing TRL takes ten seconds, which `--help` saves."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .upstream.quiet import without_noise
    from .upstream.versions import require_versions

    require_versions()
    with without_noise():
        return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
