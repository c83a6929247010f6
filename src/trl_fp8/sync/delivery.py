"""Bringing an engine to its policy, and keeping it from generating where that did not succeed.

    deliver:   wake -> calibrate KV scales -> [write weights and scales -> finite? -> verify KV scales -> audit]
               -> reset prefix cache
    frozen:    parts of a policy that nobody trains are written once, by the first delivery or before it
    failure:   in brackets the engine is neither the old policy nor known to be the new one: require_whole raises until
               a delivery succeeded. What failed on one rank failed on all; a RuntimeError is tried once more, on all
    generate:  require_whole, and verify: nobody wrote to weights or scales since

Ranks deliver together and generate apart: with tools one takes more turns than another. So `verify` concerns the ranks
that share an engine, and no others. An error outside of the brackets is raised where it happens, and no collective
follows it: the other ranks wait in theirs until the launcher ends the job.

Nothing here knows what an engine is made of: `Engine` is all that is asked of one.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.recipe import FP8Recipe

from .audit import ReduceMax, Replicas, Seal, audit
from .pieces import Layout
from .policy_checks import require_finite
from .shards import GatherFailed
from .writer import Sent, Writer


logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What a delivery asks of an engine, in this order. `RuntimeError` if it cannot."""

    layout: Layout  # where its weights are

    def wake(self) -> bool: ...  # have memory for the weights, if asleep; True: what was there is lost
    def write_kv_scales(self, scales: KVScales) -> None: ...  # let the KV cache use them
    def verify_kv_scales(self, sent: KVScales) -> None: ...  # the KV cache uses what was sent
    def reset_prefix_cache(self) -> None: ...  # forget what was computed with other weights


Tensors = Callable[[], AbstractContextManager[Iterator[Sent]]]  # opens parameters of a policy, a collective


@dataclass
class Part:
    """What of an engine is written together."""

    layout: Layout
    tensors: Tensors  # of the policy, all that `layout` has but buffers
    at_once: bool = False  # as for `Writer`
    survives_sleep: bool = False  # the engine brings it back itself when it wakes
    seal: Seal | None = None  # of what the engine holds; None unless that is the policy's
    fp8_weights: int = 0
    weight_relative_error: float = 0.0  # as in `SyncReport`; of the last write
    dead_blocks: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """As the engine holds it on this rank, scales included."""
        return sum(tensor.nbytes for tensor in self.layout.held.values())


@dataclass(frozen=True)
class SyncReport:
    """One finished sync."""

    seconds: float  # wall time; of it:
    quantize_seconds: float  # quantizing and writing, as the host sees it; on a GPU the device may go on
    calibration_seconds: float
    audited_tensors: int  # read back and compared
    bytes_sent: int  # of what was written, as the engine holds it on this rank, scales included
    fp8_weights: int
    weight_relative_error: float  # root of the squared quantization error over the squared weight, of sampled own rows
    dead_blocks: dict[str, int]  # FP8 weight -> number of its blocks that are as good as zero
    kv_scales: KVScales | None  # None if the KV cache is not FP8


class Delivery:
    """One engine, which holds no policy yet, and the policy `model` that it follows."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        recipe: FP8Recipe,
        tensors: Tensors,
        *,
        frozen: Sequence[Part] = (),  # what is written once; `tensors` are all others
        at_once: bool = False,  # as for `Writer`
        replicas: Replicas | None = None,  # the ranks that have to hold the same; None on one process
    ):
        self._engine, self._model, self._recipe, self._replicas = engine, model, recipe, replicas
        names = set(engine.layout.names).difference(*(part.layout.names for part in frozen))
        layout = engine.layout.part(names) if frozen else engine.layout
        self.frozen, self._trained = frozen, Part(layout, tensors, at_once)
        self.last: SyncReport | None = None  # of the latest delivery that succeeded
        self.failures = 0  # deliveries that failed their audit, and engines that were found changed (each raised)

    def deliver(self, calibrate: Callable[[], KVScales] | None = None) -> SyncReport:
        """Bring the engine to the policy's current weights and KV scales, and prove it. With replicas a collective.

        Args:
            calibrate: Returns the scales of the current policy, the same on every rank. None: no FP8 KV cache.

        Raises:
            ValueError: The policy cannot be calibrated: the engine keeps the previous one, unless it slept without.
                Or it holds NaN or infinities: that was seen as it was written.
            RuntimeError: Writing (tried twice) or the audit failed, here or on another rank. The next success allows
                generation.
            GatherFailed: On this rank alone, which enters no further collective.
        """
        start = time.perf_counter()
        if self._engine.wake():
            for part in self._parts:
                part.seal = part.seal if part.survives_sleep else None
        due = self._due()
        writing = sum(self.send(part) for part in due)  # first: a policy that shares its base calibrates with it
        awake = time.perf_counter()
        kv_scales = self._calibrated(calibrate) if calibrate else None
        calibrated = time.perf_counter()
        writing += self.send(self._trained, kv_scales)
        try:
            self._engine.reset_prefix_cache()
        except RuntimeError:
            self._trained.seal = None
            raise
        parts, sent = self._parts, [*due, self._trained]
        self.last = SyncReport(
            seconds=time.perf_counter() - start,
            quantize_seconds=writing,
            calibration_seconds=calibrated - awake,
            audited_tensors=sum(len(part.seal.values) for part in sent),
            bytes_sent=sum(part.bytes for part in sent),
            fp8_weights=sum(part.fp8_weights for part in parts),
            weight_relative_error=max(part.weight_relative_error for part in parts),
            dead_blocks={name: count for part in parts for name, count in part.dead_blocks.items()},
            kv_scales=kv_scales,
        )
        return self.last

    def send(self, part: Part, kv_scales: KVScales | None = None) -> float:
        """Write a part, and what is written with it, and prove it. Returns the seconds that the writing took, as the
        host sees it; on a GPU the device may go on. Raises as `deliver`.
        """
        start, part.seal = time.perf_counter(), None
        writer = self._written(part, kv_scales)
        seconds = time.perf_counter() - start
        part.weight_relative_error, part.dead_blocks = writer.inspect(self._of_all)
        try:
            part.seal = self._proven(part, writer, kv_scales)
        except RuntimeError:
            self.failures += 1
            raise
        part.fp8_weights = writer.fp8_weights
        return seconds

    @property
    def _parts(self) -> list[Part]:
        return [*self.frozen, self._trained]

    def _due(self) -> list[Part]:
        """Frozen parts that some rank's engine lacks: one rank may have found its own changed, but all send."""
        missing = [int(part.seal is None) for part in self.frozen]
        missing = self._worst(missing, self._of_all) if missing else []
        return [part for part, is_missing in zip(self.frozen, missing, strict=True) if is_missing]

    def require_whole(self) -> None:
        """Raise `RuntimeError` unless the latest delivery succeeded."""
        if any(part.seal is None for part in self._parts):
            raise RuntimeError(
                "the engine holds no complete policy: weights were never synced, or the last sync failed. Call "
                "sync_weights() first."
            )

    def verify(self) -> None:
        """Before each generation: raise `RuntimeError` unless the engine still holds what was delivered.

        A collective of the ranks that share this engine, which generate together.
        """
        self.require_whole()
        changes = [self._change(part) for part in self._parts]
        of_engine = self._replicas and self._replicas.reduce_max_of_engine
        broken = self._worst([int(change is not None) for change in changes], of_engine)
        if any(broken):  # the ranks that share the engine would wait for this one
            self.failures += 1
            for part, is_broken in zip(self._parts, broken, strict=True):
                part.seal = None if is_broken else part.seal
            own = next((change for change in changes if change is not None), None)
            theirs = "another rank's part of the engine has changed since the last sync: see its log."
            raise own or RuntimeError(theirs)

    def _change(self, part: Part) -> RuntimeError | None:
        """What became of a part on this rank since it was sent."""
        try:
            part.seal.require_unbroken()
            if part is self._trained and self.last.kv_scales is not None:
                self._engine.verify_kv_scales(self.last.kv_scales)
        except RuntimeError as error:
            return error

    def _calibrated(self, calibrate: Callable[[], KVScales]) -> KVScales:
        try:
            return calibrate()
        except ValueError:
            # The usual reason, by name. This rank looks alone: others may still be in a collective of the calibration,
            # and one that this rank begins now would meet that
            require_finite(self._model)
            raise

    def _written(self, part: Part, kv_scales: KVScales | None) -> Writer:
        """Weights and scales written, on all ranks; what was raised in the last attempt is, if one of them failed."""
        attempts = 0
        while True:
            # What a failed attempt holds is let go of first: memory may be what it lacked
            attempts, writer, error = attempts + 1, None, None
            writer = Writer(part.layout, self._recipe, at_once=part.at_once)
            error = self._write(part, writer, kv_scales)
            code = 0 if error is None else 1 if isinstance(error, RuntimeError) else 2
            [failed] = self._worst([code], self._of_all)
            if not failed:
                return writer
            error = error or RuntimeError("weight sync failed on another rank, whose log says why.")
            if failed > 1 or attempts > 1:
                raise error
            logger.warning(f"weight sync failed and is repeated once: {error}")

    @property
    def _of_all(self) -> ReduceMax | None:
        return self._replicas and self._replicas.reduce_max

    def _worst(self, codes: list[int], reduce_max: ReduceMax | None) -> list[int]:
        """The largest of each over the ranks of `reduce_max`, for whom the host waits. None: over this rank alone."""
        if reduce_max is None:
            return codes
        # On the engine's device: that is where ranks can meet. A policy that FSDP2 has not dealt yet is on the host
        engine = next(iter(self._trained.layout.held.values()))
        found = torch.tensor(codes, device=engine.device)
        reduce_max(found)
        return found.tolist()

    def _write(self, part: Part, writer: Writer, kv_scales: KVScales | None) -> Exception | None:
        """What was raised, if anything was."""
        buffers = persistent_buffers(self._model) if part is self._trained else ()
        try:
            with part.tensors() as parameters:
                try:
                    writer.write(parameters, buffers)
                except Exception:
                    for _ in parameters if self._replicas else ():  # gathered together: other ranks wait for this one
                        pass
                    raise
            if kv_scales is not None:
                self._engine.write_kv_scales(kv_scales)
        except GatherFailed:
            raise
        except Exception as error:
            return error

    def _proven(self, part: Part, writer: Writer, kv_scales: KVScales | None) -> Seal:
        """The seal of what was written. `RuntimeError` if weights or KV scales did not arrive, here or on a rank."""
        lost = None
        if kv_scales is not None:
            try:
                self._engine.verify_kv_scales(kv_scales)
            except RuntimeError as error:
                lost = error
        try:
            seal = audit(part.layout, writer, kv_scales, self._replicas, kv_scales_arrived=lost is None)
        except RuntimeError as differs:
            lost = lost or differs
        # Of ranks that share an engine each audits a part of it, which no other rank may have
        [failed] = self._worst([int(lost is not None)], self._of_all)
        if failed:
            raise lost or RuntimeError("weight sync failed its audit on another rank, whose log says what differs.")
        return seal
