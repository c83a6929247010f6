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

`mask` is TRL's attention mask `[B, S]`, of which the last `logits_to_keep` columns are scored.

The trainer calls a hook of all features in the order of `trainer.ORDER`. A feature is a callback of the trainer, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.head import Logits

from .log_ratio import LogRatio, batch_log_ratio
from .metric import Metric


if TYPE_CHECKING:
    from trl_fp8.engine.vllm.part import EnginePart


@dataclass
class Rollouts:
    """Token ids of one generation, a list for each rollout."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    metrics: dict[str, Metric] = field(default_factory=dict)  # measured by features; the trainer logs all of them

    @cached_property
    def sequences(self) -> list[list[int]]:
        """Prompt and completion of each rollout."""
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [list(prompt) + list(completion) for prompt, completion in pairs]


@dataclass
class Batch:
    """One generation batch on its way from TRL's scoring to its loss."""

    tensors: dict[str, torch.Tensor]  # TRL's, whose keys its loss reads
    metrics: dict[str, Metric] = field(default_factory=dict)  # measured by features; the trainer logs all of them
    record: dict = field(default_factory=dict)  # what the run's log keeps of it besides

    @cached_property
    def ratio(self) -> LogRatio | None:
        """Log-ratios of the tokens that the policy wrote, as they were before a correction."""
        return batch_log_ratio(self.tensors)


class Feature(TrainerCallback):
    """Base of all features; `trainer` is the one whose step they take part in."""

    def __init__(self, trainer: GRPOTrainer):
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

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


@contextmanager
def as_rollouts_saw(features: Sequence[Feature]) -> Iterator[None]:
    """`Feature.as_rollouts_saw` of all of them."""
    with ExitStack() as around:
        for feature in features:
            around.enter_context(feature.as_rollouts_saw())
        yield
