"""The FP8 base of a policy with adapters, from the trainer's side: which it is, and what an export says of it."""

from typing import TYPE_CHECKING

from accelerate.logging import get_logger

from trl_fp8.run.feature import Feature

from .adaptable import require_adaptable
from .held_base import SharedBase
from .loading import SOURCE


if TYPE_CHECKING:
    from trl_fp8.engine.vllm.part import EnginePart
    from trl_fp8.rollouts import FP8Rollouts


logger = get_logger(__name__)


class BaseInEngine(Feature):
    """Made when the policy is there. The run's recipe is that of the base: codes of a checkpoint have their own."""

    def __init__(self, trainer: "FP8Rollouts"):
        super().__init__(trainer)
        source = trainer.kept.pop(SOURCE)
        trainer.recipe = source.recipe
        require_adaptable(trainer.model, source.recipe)
        self.base = SharedBase(trainer.model, source, trainer.accelerator.device)

    def engine_part(self) -> "EnginePart":
        from trl_fp8.features.shared_base.engine_base import BasePart

        return BasePart(self.base)

    def keeps_adapters_apart(self) -> bool:
        return True

    def __str__(self) -> str:
        return "on the engine's FP8 base; syncs send adapters"

    def merge_note(self, what: str) -> str:
        into = "the original weights"
        if isinstance(self.base.original, str):
            into = "dequantized FP8 weights"
            logger.warning(f"{what}: adapters are merged into {into}, because {self.base.original}.")
        return (
            f"Adapters are merged into {into}: W + s B A, in FP32. The engine that they were trained with computed "
            "Q(W) x + B A x, Q to FP8. "
        )
