"""The contract between a trainer and its engine: who calls what, in which order, and who has to call together.

    _start_engine(recipe, parts)            trainer, all ranks: afterwards numerics, kernels and pinned are known
    for each generation:
        begin(occasion, keep_weights)       run/syncs, each rank: what the generation is for
        sync_weights()                      TRL, all ranks: if the policy has changed since the last
            deliver(tensors)                    policy -> engine, and the proof that it arrived
            after_sync()                        features look at the engine, from which nothing was sampled yet
        generate(prompts)                   TRL or a rollout_func, ranks of one engine: once a turn
            verify()                            nobody wrote to the engine since
        for each loss:                      features read last_sync in between
            send_weights()                  one forward, all ranks: if the policy has changed since the last
                deliver(tensors, prepare=False)

All ranks call `send_weights` after a generation whose mismatch is explained (features/one_forward/explanation.py).
Outside of the loop all ranks call `policy_tensors` for exports, and ranks of one engine call `prefill`. Ranks of
different engines do not wait for each other in `generate`.

`RolloutEngine` stands at `trainer.vllm_generation`; the smallest is in `testing/fake_rollout_engine.py`.
`InPlaceDelivery` writes into tensors of an engine; if its workers are other processes, they take them in `arrive`.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.quantization.formats import ActivationScaling
from trl_fp8.sync.audit import Replicas
from trl_fp8.sync.records import SyncReport, Tensors
from trl_fp8.sync.writer import NamedTensor

from .kernels import EngineKernels


@dataclass(frozen=True)
class EngineNumerics:
    """Description of an engine's arithmetic, complete for a trainer that follows it."""

    kernels: Mapping[str, int]  # name of each FP8 kernel of linears and experts -> number of layers that it runs
    linears: ActivationScaling | None = None  # how FP8 linears quantize their input; None if no linear is FP8
    query_rounded: bool = False  # attention rounds q to e4m3, as it does k and v


@dataclass(frozen=True)
class Survivors:
    """The tokens that top-k, top-p and min-p left, for each token of one sequence of T, E of them in all."""

    counts_T: np.ndarray  # int32; how many for each token, 0 where none was sampled (prompts, results of tools)
    ids_E: np.ndarray  # int32, those of one token behind those of another


class KVScaleStore(Protocol):
    """The scales of an engine's FP8 KV cache, in every place where the engine keeps them."""

    def write(self, scales: KVScales) -> None:
        """Copy the scales of all FP8 layers into the engine. Does not synchronize with the device."""

    def verify(self, scales: KVScales) -> None:
        """Raise `RuntimeError` unless each copy in the engine equals `scales`."""


@runtime_checkable
class Delivery(Protocol):
    """The way from a policy to one engine."""

    last: SyncReport | None  # of the latest delivery that succeeded
    failures: int  # deliveries that failed their audit, and engines that were found changed; each raised

    def deliver(self, tensors: Tensors, *, prepare: bool = True) -> SyncReport:
        """Bring the engine to the policy's weights and prove it; see `InPlaceDelivery.deliver`. A collective."""

    def require_whole(self) -> None:
        """Raise `RuntimeError` unless the latest delivery succeeded."""

    def verify(self) -> None:
        """Raise `RuntimeError` unless the engine still holds what was delivered. Of the ranks that share it."""


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine as trainer, features and run use it. It follows the policy that it was started with."""

    numerics: EngineNumerics
    kernels: EngineKernels | None  # None: the trainer cannot call them
    pinned: Mapping[str, str]  # what was chosen on this device, as `vllm_engine_kwargs` would say it
    replicas: Replicas | None  # the ranks that have to hold the same bytes; None on one process
    last_sync: SyncReport | None  # `Delivery.last`
    audit_failures: int  # `Delivery.failures`
    sync_metrics: Mapping[str, float]  # further ones of the latest sync, by the names under which they are logged

    def begin(self, occasion: tuple[int, int, int], keep_weights: bool) -> None:
        """Note that the next generation belongs to `occasion`: the run's seed, its step, and 1 if it trains or 0. What
        is sampled depends on it alone. With `keep_weights` the same weights will generate again, so that an engine
        that sleeps between turns keeps them.
        """

    def sync_weights(self) -> None:
        """Deliver the policy, with all that is carried made anew. Raises as `Delivery.deliver`."""

    def send_weights(self) -> None:
        """Deliver the policy's weights alone, and what is carried as it is."""

    def generate(
        self, prompts: list, images: list | None, num_generations: int, profiler: AbstractContextManager | None = None
    ) -> tuple[list, list, list, list]:
        """Continue prompts (token ids), each of which stands there once for each of its completions.

        Returns prompts, completions (token ids), log-probs of their tokens `[completion][token][1]`, and the ids of
        these tokens in the same form, as TRL's `VLLMGeneration`.
        """

    def prefill(self, tokens: list[int]) -> list[int]:
        """Compute the layers for a sequence, that of the first rank that shares the engine; returns that sequence."""

    def policy_tensors(self) -> AbstractContextManager[Iterator[NamedTensor]]:
        """The policy's `(checkpoint name, full tensor)`, merged and gathered."""
