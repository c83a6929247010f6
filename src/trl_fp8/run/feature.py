"""What an optional part of a step is to the trainer: an object with these hooks. Each of them does nothing by itself.

    engine_part()                    the engine is about to start: what does it have to have?
    engine_started(numerics, kernels) the engine can say how it computes, and be called
    before_generation(prompts)       TRL is about to generate; nothing is tokenized yet
    before_turn(prompt_ids)          before each call of the engine, and before the sync that it may need
    after_sync()                     the engine holds the policy's weights, nothing was sampled from them yet
    after_generation(rollouts)       all turns are through
    scoring(mask, logits_to_keep)    around each pass of the policy that scores rollouts (TRL's old log-probs, loss)
    reference(mask, logits_to_keep)  around each pass of a reference, which may be the policy without its adapters
    logits(reference)                what makes the logits of policy or reference, if it is not their own head
    as_rollouts_saw()                around a pass that has to compute as the latest rollouts were computed
    extend_batch(batch)              TRL's batch is complete: add to it, correct it, measure it
    begin_loss(inputs)               a forward for the loss is about to start
    end_loss()                       its backward is through: gradient checkpointing runs the forward again in between
    save(folder), load(folder)       a checkpoint is written or read, on every rank
    facts(), export_options(), merge_note(what), str()   what a log, an export, its card, the console say of it

`mask` is TRL's attention mask `[B, S]`, of which the last `logits_to_keep` columns are scored.

The trainer calls a hook of all features in the order of features/__init__.py. A feature is a callback of the trainer,
too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.head import Logits

from .batch import Batch, Rollouts


if TYPE_CHECKING:
    from trl_fp8.engine.vllm.part import EnginePart
    from trl_fp8.rollouts import FP8Rollouts


class Feature(TrainerCallback):
    """Base of all features; `trainer` is the one whose step they take part in."""

    keeps_log: bool = False  # `trl-fp8 report` can be asked about the run

    def __init__(self, trainer: "FP8Rollouts"):
        self.trainer = trainer

    def engine_part(self) -> "EnginePart | None":
        """What this feature needs of the engine; asked once, before the engine starts."""
        return None

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels) -> None: ...

    def before_generation(self, prompts: list) -> None: ...

    def before_turn(self, prompt_ids: list[list[int]]) -> None: ...

    def after_sync(self) -> None: ...

    def after_generation(self, rollouts: Rollouts) -> None: ...

    def scoring(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        return nullcontext()

    def reference(self, mask: torch.Tensor, logits_to_keep: int) -> AbstractContextManager:
        return nullcontext()

    def logits(self, reference: bool) -> Logits | None:
        """What makes the logits of the policy, or of its `reference`, in this run; None: their own output heads."""
        return None

    def as_rollouts_saw(self) -> AbstractContextManager:
        """Inside the block the policy computes with what the latest rollouts were computed with, a rounded cache say.
        Unlike `scoring` it measures nothing.
        """
        return nullcontext()

    def extend_batch(self, batch: Batch) -> None: ...

    def begin_loss(self, inputs: Mapping[str, torch.Tensor]) -> None: ...

    def end_loss(self) -> None: ...

    def keeps_adapters_apart(self) -> bool:
        """Whether a sync merges no adapters into the policy's weights."""
        return False

    def facts(self) -> dict[str, object]:
        """What the head of the run's log and the model card say of it (run/facts.py)."""
        return {}

    def export_options(self) -> dict[str, object]:
        """What an FP8 checkpoint holds of it: arguments of `export.export.export_fp8`. `ValueError` if that is not
        known yet.
        """
        return {}

    def merge_note(self, what: str) -> str:
        """For the card of a checkpoint that `what` writes: what adapters were merged into. Warns if that is not what
        the run started from.
        """
        return ""

    def __str__(self) -> str:
        """What the start of a run says of the trainer's own computing; empty for nothing."""
        return ""

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


@contextmanager
def as_rollouts_saw(features: Sequence[Feature]) -> Iterator[None]:
    """`Feature.as_rollouts_saw` of all of them."""
    with ExitStack() as around:
        for feature in features:
            around.enter_context(feature.as_rollouts_saw())
        yield
