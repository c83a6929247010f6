"""The contract between a trainer and its engine: the calls, their order, and which ranks have to call together.

    _start_engine(recipe, parts)            trainer, all ranks: afterwards numerics, kernels and pinned are known
    for each generation:
        begin(occasion, keep_weights)       run/syncs, each rank: what the generation is for
        sync_weights()                      TRL, all ranks: if the policy has changed since the last sync
            deliver(tensors)                    policy -> engine, and the proof that it arrived
            after_sync()                        features check the engine before anything is sampled from it
        generate(prompts)                   TRL or a rollout_func, ranks of one engine: once a turn
            verify()                            proof that nothing has written to the engine since the delivery
        (features read last_sync here)
        for each loss:                      only if the trainer calls the engine's kernels (one forward)
            send_weights()                  all ranks: if the policy has changed since it was last sent
                deliver(tensors, prepare=False)     with the KV scales of the last sync

`parts` are hooks of features (engine/vllm/part.py). A turn is one call of the engine in a conversation. All ranks also
call `send_weights` before features/one_forward/explanation.py explains the mismatch of a generation. Outside of the
loop all ranks call `policy_tensors` for exports, and ranks of one engine call `prefill`. Ranks of different engines do
not wait for each other in `generate`.

`trainer.vllm_generation` is the `RolloutEngine`; `testing/fake_rollout_engine.py` has the smallest implementation.
`InPlaceDelivery` (sync/delivery.py) is the `Delivery` that writes into an engine's tensors. If the
engine's workers are other processes, its `Engine.arrive` makes them copy these tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.quantization.formats import ActivationScaling
from trl_fp8.sync.audit import Replicas
from trl_fp8.sync.records import Occasion, SyncReport, Tensors
from trl_fp8.sync.writer import NamedTensor

from .kernels import EngineKernels


@dataclass(frozen=True)
class EngineNumerics:
    """Description of an engine's arithmetic: all that a trainer needs to round as the engine does."""

    kernels: Mapping[str, int]  # name of each FP8 kernel of linears and experts -> number of layers that use it
    linears: ActivationScaling | None = None  # how FP8 linears quantize their input; None if no linear is FP8
    query_rounded: bool = False  # whether attention rounds q to e4m3, as it does k and v


@dataclass(frozen=True)
class Survivors:
    """The candidates that top-k, top-p and min-p left for each of the T tokens of a sequence, E candidates in all."""

    counts_T: np.ndarray  # int32, candidates for each token; 0 if it was not sampled (prompts, results of tools)
    ids_E: np.ndarray  # int32, the candidates' token ids, those for the first token first


class KVScaleStore(Protocol):
    """The scales of an engine's FP8 KV cache, in every place where the engine keeps them."""

    def write(self, scales: KVScales) -> None:
        """Copy the scales of all FP8 layers into the engine. Does not synchronize with the device."""

    def verify(self, scales: KVScales) -> None:
        """Raise `RuntimeError` unless each copy in the engine equals `scales`."""


@runtime_checkable
class Delivery(Protocol):
    """Transport of a policy's weights into one engine."""

    last: SyncReport | None  # report of the latest delivery that succeeded
    failures: int  # number of deliveries that failed their audit, or that the engine no longer held later

    def deliver(self, tensors: Tensors, *, prepare: bool = True) -> SyncReport:
        """Write the policy's weights to the engine and prove that they arrived. Collective.

        For arguments and errors see `InPlaceDelivery.deliver`.
        """

    def require_whole(self) -> None:
        """Raise `RuntimeError` unless the latest delivery succeeded."""

    def verify(self) -> None:
        """Raise `RuntimeError` unless the engine still holds what was delivered. Collective of the engine's ranks."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Interface of an engine for `rollouts.py`, features and run/. An engine serves one policy from start to end."""

    numerics: EngineNumerics
    kernels: EngineKernels | None  # None if the trainer cannot call them
    pinned: Mapping[str, str]  # arguments of `vllm.LLM` that were chosen by timing on this device (gemms.py)
    replicas: Replicas | None  # the ranks whose engines must hold the same bytes; None on one process
    last_sync: SyncReport | None  # `Delivery.last`
    audit_failures: int  # `Delivery.failures`
    sync_metrics: Mapping[str, float]  # further metrics of the latest sync: name in the log -> value

    def begin(self, occasion: Occasion, keep_weights: bool) -> None:
        """Set what the coming generation is for. The engine seeds its sampling with `occasion`.

        With `keep_weights` the engine keeps its weights when it sleeps after this generation, because the next
        generation may need the same ones.
        """

    def sync_weights(self) -> None:
        """Deliver the policy's weights before a generation, and KV scales that are computed for them.

        Raises what `Delivery.deliver` raises.
        """

    def send_weights(self) -> None:
        """Deliver the policy's weights before a loss, with the KV scales of the last sync."""

    def generate(
        self, prompts: list, images: list | None, num_generations: int, profiler: AbstractContextManager | None = None
    ) -> tuple[list, list, list, list]:
        """Continue prompts (token ids). A prompt is in the list once for each of its completions.

        Returns four lists, as TRL's `VLLMGeneration` does: prompts and completions (token ids), and for the tokens of
        the completions `[completion][token][1]` their log-probs and their ids.
        """

    def prefill(self, tokens: list[int]) -> list[int]:
        """Run the engine's layers over a sequence and return it. All ranks of one engine use the first rank's."""

    def policy_tensors(self) -> AbstractContextManager[Iterator[NamedTensor]]:
        """Return the policy's `(checkpoint name, full tensor)` pairs, adapters merged, shards gathered. Collective."""
