"""`EnginePart`: the hooks of one feature into the engine. Modules of engine/ call parts, not features.

Also `RolloutLog`, a part that keeps notes on rollouts.

    start        arguments(platform, recipe, config, user)    further arguments for vLLM, or a refusal (`ValueError`)
                 with starting(platform, recipe):             patches while the engine is created
                     vllm.LLM(...)                            explain(error) if it raises
                 started(generation)                          `generation.llm` exists: check it, install hooks
                 weights(generation), carried(generation)     `generation.engine` exists: say what its syncs send
                 ready(generation)                            `generation.delivery` exists, the policy is not sent yet
    each sync    synced(generation)                           the engine holds the policy, nothing is sampled yet
    generation   begin()                                      before the calls of one generation
                 generated(outputs)                           after each call

A server is started by `trl-fp8 serve`, which calls `environment` and `arguments`. vLLM's processes in the server have
no parts. A part that has to change these processes names a module in `environment`, and each process calls the
module's function `register`. The trainer calls `served`, `weights`, `carried`, `staged` and `synced`.

Parts are called in the order in which an engine got them. A feature returns its part from `Feature.engine_part()` and
keeps a reference, to read what the part learned.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from transformers import PretrainedConfig
from vllm import RequestOutput

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.records import CarriedValue

from .colocated import Delivered, Generation
from .platform import Platform
from .policy_weights import PolicyWeights


class EnginePart:
    """Base of all parts. Each method does nothing by default."""

    # Whether FP8 linears must run on a kernel that gives a row the same bits in every batch
    batch_invariant: bool = False
    # Kernels that the trainer may call. `ready` sets them in the parts of features that compute or compare with them
    kernels: EngineKernels | None = None

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        """Return further arguments of `vllm.LLM(...)`. If an argument is a dictionary, as `compilation_config` is, the
        dictionaries of all parts and of the platform are merged.

        `config` is the policy's. `user` are the `vllm_engine_kwargs`, which override all of these arguments. Raises
        `ValueError` if the platform, or an engine with the user's arguments, cannot do what the feature needs.
        """
        return {}

    def environment(self, recipe: FP8Recipe, config: PretrainedConfig) -> dict[str, str]:
        """Return environment variables for a server's processes. The variable `plugin.EXTENSION` names a module whose
        function `register` these processes call.
        """
        return {}

    def starting(self, platform: Platform, recipe: FP8Recipe) -> AbstractContextManager:
        """Patch vLLM, and register kernels, for an engine that starts inside the block."""
        return nullcontext()

    def explain(self, error: ValueError) -> ValueError | None:
        """Return an error that names the flag, if vLLM could not start because of this feature. Otherwise None."""
        return None

    def started(self, generation: Generation) -> None:
        """Check the started engine and install hooks. Raises `ValueError` for a setting of the user's."""

    def served(self, base_url: str, facts: Mapping[str, list]) -> dict[str, list[int]] | None:
        """Return the shapes of the tensors that a server holds for this feature beside the policy's tensors, by the
        names under which a sync sends them. Return None if the feature needs no such tensors.

        `facts` are the facts about the layers that the server adds to vLLM's model (`layout.Added.facts`). Raises
        `ValueError` if the facts do not fit the feature.
        """
        return None

    def weights(self, generation: Delivered) -> PolicyWeights | None:
        """Return the source of a sync's tensors; None if a sync sends the policy's own tensors."""
        return None

    def carried(self, generation: Delivered) -> CarriedValue | None:
        """Return the value that each sync writes beside the weights; None if there is none. Raises `RuntimeError` if
        the engine cannot take it.
        """
        return None

    def ready(self, generation: Generation) -> None:
        """Send the tensors that the engine gets only once, and find the kernels that features use."""

    def staged(self, generation: Delivered) -> None:
        """Do for a server what `ready` does: stage the tensors that only the first sync sends."""

    def synced(self, generation: Delivered) -> None:
        """Check the engine, which holds the policy's weights. Raises `RuntimeError` on all ranks if that fails."""

    def begin(self) -> None:
        """Forget the notes on the last generation."""

    def generated(self, outputs: list[RequestOutput]) -> None:
        """Take notes on the rollouts of one call of the engine."""


@dataclass
class RolloutLog(EnginePart, ABC):
    """A part that keeps a note on each rollout since `begin`, such as the experts that routers chose.

    A note is looked up by the rollout's token ids, because a trainer gets token ids and no requests. A subclass fills
    in clauses of two errors:

        3 of 8 rollouts were not generated by the trainer's engine, so {not_known}. ...; otherwise {remedy}.
        {cannot_return} here: (vLLM's own reason, found by `vllm_reason`). Otherwise {remedy}.
    """

    # Function that returns a note on each output of one call. It depends on the platform, so a subclass sets it in
    # `started`
    source: Callable[[list[RequestOutput]], list] | None = None
    calls: int = 0  # number of calls since `begin`
    records: list[tuple[bytes, object]] = field(default_factory=list)  # token ids of prompt and completion, and note
    not_known: ClassVar[str]  # clause of the first error: what is not known of a rollout without a note
    cannot_return: ClassVar[str]  # clause of the second error: what vLLM cannot return, so that it cannot start
    vllm_reason: ClassVar[str]  # regular expression that finds vLLM's reason for that in vLLM's own error
    remedy: ClassVar[str]  # the remedy in both errors, after "otherwise"

    def explain(self, error: ValueError) -> ValueError | None:
        reason = re.search(self.vllm_reason, str(error))
        if reason is None:
            return None
        return ValueError(f"{self.cannot_return} here: {reason[0].strip().rstrip('.')}. Otherwise {self.remedy}.")

    def begin(self) -> None:
        self.calls, self.records = 0, []

    def generated(self, outputs: list[RequestOutput]) -> None:
        self.calls += 1
        for output, note in zip(outputs, self.source(outputs), strict=True):
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            self.check(note, len(tokens))
            self.records.append((_bytes(tokens), note))

    def notes_on(self, sequences: list[list[int]]) -> list:
        """Return the note on each sequence. Notes of several calls that generated parts of it are merged."""
        keys = [_bytes(tokens) for tokens in sequences]
        # Usually the engine was called once, and the trainer has the rollouts in the engine's order
        if self.calls == 1 and keys == [tokens for tokens, _ in self.records]:
            return [note for _, note in self.records]
        notes = [self._merged(key, len(tokens)) for key, tokens in zip(keys, sequences, strict=True)]
        missing = sum(note is None for note in notes)
        if missing:
            raise RuntimeError(
                f"{missing} of {len(sequences)} rollouts were not generated by the trainer's engine, so "
                f"{self.not_known}. A rollout_func has to generate with trainer.vllm_generation.llm and return its "
                f"token ids; otherwise {self.remedy}."
            )
        return notes

    def _merged(self, key: bytes, length: int) -> object | None:
        """Merge the notes of the calls that generated parts of a sequence. Return None if there are none."""
        # A call has generated a prefix of the sequence. Or the sequence is a prefix of what the call has generated,
        # because the trainer has cut off the last completion
        notes = [note for tokens, note in self.records if key.startswith(tokens) or tokens.startswith(key)]
        return self.merged(notes, length) if notes else None

    def check(self, note: object, length: int) -> None:
        """Raise `RuntimeError` unless the note covers `length` tokens."""

    @abstractmethod
    def merged(self, notes: list, length: int) -> object:
        """Merge the notes of a conversation's calls into one note on its `length` tokens."""


def _bytes(tokens: list[int]) -> bytes:
    """Return token ids as bytes. The bytes of a sequence's prefix are a prefix of the sequence's bytes."""
    return np.asarray(tokens, np.int32).tobytes()
