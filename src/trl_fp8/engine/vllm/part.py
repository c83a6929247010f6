"""`EnginePart`: what a feature needs of a vLLM engine, which knows parts but no features. And `RolloutLog`.

    start        arguments(platform, recipe, config, user)    further arguments for vLLM; `ValueError` refuses
                 with starting(platform, recipe):             what is in force while the engine is made
                     vllm.LLM(...)                            explain(error), if it raises
                 started(generation)                          `generation.llm` exists: check it, watch it
                 weights(generation), carried(generation)     `generation.engine` exists: what will its syncs send?
                 ready(generation)                            `generation.delivery` exists, the policy was not sent yet
    each sync    synced(generation)                           the engine holds the policy, nothing was sampled from it
    generation   begin()                                      before the calls of one generation
                 generated(outputs)                           after each of them

Parts are called in the order in which they were given. A feature returns its part from `Feature.engine_part()` and
keeps it, to read what the part learned.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from transformers import PretrainedConfig
from vllm import RequestOutput

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.records import CarriedValue

from .colocated import Generation
from .platform import Platform
from .policy_weights import PolicyWeights
from .rollout_llm import RolloutListener


class EnginePart(RolloutListener):
    """Base of all parts. Each method does nothing by default."""

    batch_invariant: bool = False  # FP8 linears must run on a kernel that gives a row the same bits in every batch
    kernels: EngineKernels | None = None  # for a policy that calls them or is compared with them; from `ready` on

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        """Return further arguments of `vllm.LLM(...)`; dictionaries are merged with those of platform and other parts.

        `config` is the policy's, `user` `vllm_engine_kwargs`, which win over all of these. `ValueError`: the platform,
        or an engine with the user's arguments, cannot do what the feature needs.
        """
        return {}

    def starting(self, platform: Platform, recipe: FP8Recipe) -> AbstractContextManager:
        """Patch and register what an engine finds if it is started inside the block."""
        return nullcontext()

    def started(self, generation: Generation) -> None:
        """Check the engine that has started, and install what watches it. `ValueError` for what the user set."""

    def weights(self, generation: Generation) -> PolicyWeights | None:
        """Return the source of a sync's tensors if it is not the policy itself."""
        return None

    def carried(self, generation: Generation) -> CarriedValue | None:
        """Return what each sync writes beside weights. `RuntimeError` if the engine cannot take it."""
        return None

    def ready(self, generation: Generation) -> None:
        """Send what the engine gets only once, and read from it what features follow."""

    def synced(self, generation: Generation) -> None:
        """Check what only an engine with weights can show. `RuntimeError` on all ranks if it fails."""


@dataclass
class RolloutLog(EnginePart, ABC):
    """A part that takes notes on everything generated since `begin`, and looks them up by token ids: a trainer gets
    these, and not the requests.
    """

    source: Callable[[list[RequestOutput]], list] | None = None  # requests of one call -> a note on each
    calls: int = 0
    records: list[tuple[bytes, object]] = field(default_factory=list)  # token ids of each completion, and its note
    unknown: ClassVar[str]  # what is not known of rollouts without notes, and what to do about it
    otherwise: ClassVar[str]

    def begin(self) -> None:
        self.calls, self.records = 0, []

    def generated(self, outputs: list[RequestOutput]) -> None:
        self.calls += 1
        for output, note in zip(outputs, self.source(outputs), strict=True):
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            self.check(note, len(tokens))
            self.records.append((_bytes(tokens), note))

    def of(self, sequences: list[list[int]]) -> list:
        """Return the note on each sequence, merged if several calls wrote one."""
        keys = [_bytes(tokens) for tokens in sequences]
        if self.calls == 1 and keys == [tokens for tokens, _ in self.records]:
            return [note for _, note in self.records]
        found = [self._merged(key) for key in keys]
        if missing := sum(note is None for note in found):
            raise RuntimeError(
                f"{missing} of {len(sequences)} rollouts were not generated by the trainer's engine, so that "
                f"{self.unknown}. A rollout_func has to generate with trainer.vllm_generation.llm and return its "
                f"token ids; otherwise {self.otherwise}."
            )
        return found

    def _merged(self, key: bytes) -> object | None:
        notes = [note for tokens, note in self.records if key.startswith(tokens) or tokens.startswith(key)]
        return self.merged(notes, len(key) // 4) if notes else None

    def check(self, note: object, length: int) -> None:
        """Raise `RuntimeError` for a note that is not on a sequence of `length` tokens."""

    @abstractmethod
    def merged(self, notes: list, length: int) -> object:
        """Merge the notes of the calls that began or continued a conversation into one on its `length` tokens."""


def _bytes(tokens: list[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
