"""`EnginePart`: what a feature needs of a vLLM engine."""

from typing import TYPE_CHECKING

from trl_fp8.sync.delivery import Carried


if TYPE_CHECKING:
    from .generation import FP8VLLMGeneration


class EnginePart:
    """Base of all parts. Each method does nothing by itself."""

    def carried(self, generation: "FP8VLLMGeneration") -> Carried | None:
        """What each sync brings to `generation.engine` beside the weights. `RuntimeError` if it cannot take it."""
        return None
