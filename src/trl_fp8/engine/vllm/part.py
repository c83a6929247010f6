"""`EnginePart`: what a feature needs of a vLLM engine. The engine knows no feature, it knows parts.

    start        arguments(platform, recipe, config, user)    what vLLM is told besides; `ValueError` refuses
                 with starting(platform, recipe):             what is in force while the engine is made
                     vllm.LLM(...)                            explain(error), if it raises
                 started(generation)                          `generation.llm` is there: check it, watch it
                 weights(generation), carried(generation)     `generation.engine` is there: what will its syncs send?
                 ready(generation)                            `generation.delivery` is there, and the policy is not yet
    each sync    synced(generation)                           the engine holds the policy, nothing was sampled from it
    generation   begin()                                      before the calls of one generation
                 generated(outputs)                           after each of them

Parts are called in the order in which they were given. A feature returns its part from `Feature.engine_part()` and
keeps it, to read what the part learned.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from transformers import PretrainedConfig
from vllm import RequestOutput

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import Carried


if TYPE_CHECKING:
    from .generation import FP8VLLMGeneration
    from .platform import Platform
    from .policy_weights import PolicyWeights


class EnginePart:
    """Base of all parts. Each method does nothing by itself.

    Attributes:
        batch_invariant: FP8 linears must run on a kernel that gives a row the same bits in every batch.
        kernels: What the engine computes, for a policy that calls it or is compared with it; there from `ready` on.
    """

    batch_invariant: bool = False
    kernels: EngineKernels | None = None

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        """Further arguments of `vllm.LLM(...)`; dictionaries are merged with those of the platform and other parts.

        Args:
            config: The policy's.
            user: `vllm_engine_kwargs`, which win over all of these.

        Raises:
            ValueError: The platform, or an engine with the user's arguments, cannot do what the feature needs.
        """
        return {}

    def starting(self, platform: Platform, recipe: FP8Recipe) -> AbstractContextManager:
        """Patches and registrations that an engine finds if it is started inside the block."""
        return nullcontext()

    def explain(self, error: ValueError) -> ValueError | None:
        """What vLLM's refusal to start means for the flags of this feature; None if it is about something else."""
        return None

    def started(self, generation: FP8VLLMGeneration) -> None:
        """Check the engine that has started, and install what watches it. `ValueError` for what the user set."""

    def weights(self, generation: FP8VLLMGeneration) -> PolicyWeights | None:
        """Where the tensors of a sync come from, if not from the policy as it is."""
        return None

    def carried(self, generation: FP8VLLMGeneration) -> Carried | None:
        """What each sync brings to the engine beside weights. `RuntimeError` if the engine cannot take it."""
        return None

    def ready(self, generation: FP8VLLMGeneration) -> None:
        """Send what is sent once, and read of the engine what features follow."""

    def synced(self, generation: FP8VLLMGeneration) -> None:
        """Try what only an engine with weights can show. `RuntimeError` on all ranks if it does not hold."""

    def begin(self) -> None:
        """Forget what was noted of the last generation."""

    def generated(self, outputs: list[RequestOutput]) -> None:
        """Note what one call of the engine tells of its rollouts."""
