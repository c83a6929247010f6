"""Bringing an engine to its policy, and keeping it from generating where that did not succeed.

    deliver:   policy finite? -> wake -> calibrate KV scales -> load [weight_stream -> ledger] -> audit
               -> verify KV scales -> reset prefix cache
    failure:   abort what was loaded, try once more on a single process; then require_whole raises
    generate:  require_whole, and verify: nobody wrote to weights or scales since

Nothing here knows what an engine is made of: `Engine` is all that is asked of one.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from trl_fp8.quantization.kv_scales import KVScales
from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.recipe import FP8Recipe

from .ledger import Ledger, Replicas, Seal
from .pieces import Layout
from .policy_checks import require_finite
from .weight_stream import Named, Share, WeightStream


logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What a delivery asks of an engine, in this order. `RuntimeError` if it cannot."""

    layout: Layout

    def wake(self) -> None: ...  # have memory for the weights, if asleep
    def load(self, tensors: Iterator[Named]) -> None: ...  # take a whole policy
    def abort(self) -> None: ...  # after a `load` that raised, be ready for another one
    def verify_kv_scales(self, sent: KVScales) -> None: ...  # the KV cache uses what was sent
    def reset_prefix_cache(self) -> None: ...  # forget what was computed with other weights


@dataclass(frozen=True)
class SyncReport:
    """One finished sync."""

    seconds: float  # wall time; of it:
    quantize_seconds: float  # outside of the engine's loader
    calibration_seconds: float
    audited_tensors: int  # read back and compared
    bytes_sent: int  # of all weights as the engine holds them, scales included
    fp8_weights: int
    weight_relative_error: float  # root of the sampled squared quantization error over the squared weight
    dead_blocks: dict[str, int]  # FP8 weight -> number of its blocks that are as good as zero
    kv_scales: KVScales | None  # None if the KV cache is not FP8


class Delivery:
    """One engine, which holds no policy yet, and the policy `model` that it follows."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        recipe: FP8Recipe,
        tensors: Callable[[], AbstractContextManager[Iterator[Named]]],  # opens `(checkpoint name, full tensor)`
        *,
        copy: bool = False,  # the tensors change as soon as `tensors` goes on, before the engine has read them
        replicas: Replicas | None = None,  # the ranks that have to hold the same; None on one process
    ):
        self._engine, self._model, self._recipe, self._tensors = engine, model, recipe, tensors
        self._copy, self._replicas = copy, replicas
        self._seal: Seal | None = None  # of the policy that the engine holds; None unless it holds a whole one
        self.last: SyncReport | None = None  # of the latest delivery that succeeded
        self.failures = 0  # deliveries that failed their audit, and engines that were found changed (each raised)

    def deliver(self, calibrate: Callable[[], KVScales] | None = None, share: Share | None = None) -> SyncReport:
        """Bring the engine to the policy's current weights and KV scales, and prove it. With replicas a collective.

        Args:
            calibrate: Returns the scales of the current policy, the same on every rank. None: no FP8 KV cache.
            share: Gets each weight that was quantized, so that the trainer need not do it again.

        Raises:
            ValueError: The policy holds NaN or infinities, or cannot be calibrated. The engine keeps the previous one.
            RuntimeError: Loading (tried twice on one process) or the audit failed. The next success allows generation.
        """
        start = time.perf_counter()
        require_finite(self._model, self._replicas and self._replicas.reduce_max)
        self._engine.wake()
        awake = time.perf_counter()
        kv_scales = calibrate() if calibrate else None
        calibrated = time.perf_counter()
        self._seal = None
        try:
            ledger, stream = self._load(kv_scales, share)
        except RuntimeError as error:
            if self._replicas:  # the other ranks may be through: a lone retry would hang
                raise
            logger.warning(f"weight sync failed and is repeated once: {error}")
            ledger, stream = self._load(kv_scales, share)
        with self._audited(kv_scales):
            audited = ledger.audit(kv_scales)
        self._engine.reset_prefix_cache()
        relative_error, dead_blocks = stream.error_and_dead_blocks()
        self.last = SyncReport(
            seconds=time.perf_counter() - start,
            quantize_seconds=stream.seconds,
            calibration_seconds=calibrated - awake,
            audited_tensors=audited,
            bytes_sent=stream.bytes_sent,
            fp8_weights=stream.fp8_weights,
            weight_relative_error=relative_error,
            dead_blocks=dead_blocks,
            kv_scales=kv_scales,
        )
        self._seal = ledger.seal
        return self.last

    def require_whole(self) -> None:
        """Raise `RuntimeError` unless the latest delivery succeeded."""
        if self._seal is None:
            raise RuntimeError(
                "the engine holds no complete policy: weights were never synced, or the last sync failed. Call "
                "sync_weights() first."
            )

    def verify(self) -> None:
        """Before each generation: raise `RuntimeError` unless the engine still holds what was delivered."""
        self.require_whole()
        with self._audited(self.last.kv_scales):
            self._seal.require_unbroken()

    def _load(self, kv_scales: KVScales | None, share: Share | None) -> tuple[Ledger, WeightStream]:
        ledger = Ledger(self._engine.layout, self._replicas)
        try:
            with self._tensors() as parameters:
                options = {"copy": self._copy, "buffers": persistent_buffers(self._model), "share": share}
                stream = WeightStream(parameters, self._recipe, kv_scales, round_here=False, **options)
                self._engine.load(stream.timed(ledger.record(stream)))
        except BaseException:
            self._engine.abort()
            raise
        return ledger, stream

    @contextmanager
    def _audited(self, kv_scales: KVScales | None) -> Iterator[None]:
        """Weights are compared inside the block, KV scales after it; a difference is counted, and breaks the seal."""
        try:
            yield
            if kv_scales is not None:
                self._engine.verify_kv_scales(kv_scales)
        except RuntimeError:
            self.failures, self._seal = self.failures + 1, None
            raise
