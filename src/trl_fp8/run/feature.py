"""Features: optional parts of a step, objects with hooks that the trainer calls.

`mask` is TRL's attention mask `[B, S]`, of which the last `logits_to_keep` columns are scored.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from transformers import TrainerCallback

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.head import Logits

from .batch import Batch, Rollouts


class Feature(TrainerCallback):
    """Base of all features, whose hooks do nothing. They stand in the order in which a step comes to them.

    The trainer calls a hook of all features in the order of features/__init__.py. A feature is a callback of the
    trainer, too.
    """

    keeps_log: bool = False  # `trl-fp8 report` can be asked about the run

    def __init__(self, trainer: Any):
        self.trainer = trainer  # the `FP8Rollouts` whose step this feature takes part in

    def engine_part(self) -> Any:
        """The `EnginePart` that the engine gets for this feature, or None; asked once, before the engine starts."""
        return None

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels) -> None:
        """The engine can say how it computes, and be called."""

    def before_generation(self, prompts: list) -> None:
        """TRL is about to generate; nothing is tokenized yet."""

    def before_turn(self, prompt_ids: list[list[int]]) -> None:
        """Before each call of the engine, and before the sync that it may need."""

    def after_sync(self) -> None:
        """The engine holds the policy's weights, and nothing was sampled from them yet."""

    def after_generation(self, rollouts: Rollouts) -> None:
        """All turns are through."""

    def scoring(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        """Around each pass of the policy that scores rollouts: TRL's old log-probs, and the loss."""
        return nullcontext()

    def reference(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        """Around each pass of a reference, which may be the policy without its adapters."""
        return nullcontext()

    def logits(self, reference: bool) -> Logits | None:
        """Return the function that makes the logits of policy or reference; None: their own output heads."""
        return None

    def as_rollouts_saw(self) -> AbstractContextManager:
        """Around a pass that has to compute as the latest rollouts were computed, with a rounded cache for example.
        Unlike `scoring` it measures nothing.
        """
        return nullcontext()

    def extend_batch(self, batch: Batch) -> None:
        """TRL's batch is complete: add to it, correct it, measure it."""

    def begin_loss(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """A forward for the loss is about to start."""

    def end_loss(self) -> None:
        """The backward is through. Gradient checkpointing ran the forward again in it."""

    def save(self, folder: str) -> None:
        """A checkpoint is written, on every rank."""

    def load(self, folder: str) -> None:
        """A checkpoint is read, on every rank."""

    def keeps_adapters_apart(self) -> bool:
        """Return whether syncs leave adapters unmerged."""
        return False

    def facts(self) -> dict[str, object]:
        """Return its entries in the head of the run's log and in the model card (run/facts.py)."""
        return {}

    def export_options(self) -> dict[str, object]:
        """Return arguments of `export.export.export_fp8` for what an FP8 checkpoint holds of it. `ValueError` if that
        is not known yet.
        """
        return {}

    def merge_note(self, what: str) -> str:
        """Return the sentence on merged adapters for the card of a checkpoint that `what` writes. Warn if they are
        not merged into what the run started from.
        """
        return ""

    def banner(self) -> str:
        """Return what the start of a run says of the trainer's own computing; empty for nothing."""
        return ""


@contextmanager
def inside(managers: Iterable[AbstractContextManager]) -> Iterator[None]:
    """Enter the context managers in order, creating each one only after the previous was entered."""
    with ExitStack() as around:
        for manager in managers:
            around.enter_context(manager)
        yield


def as_rollouts_saw(features: Iterable[Feature]) -> AbstractContextManager[None]:
    """Enter `Feature.as_rollouts_saw` of all features."""
    return inside(feature.as_rollouts_saw() for feature in features)
