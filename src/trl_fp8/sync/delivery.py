"""`InPlaceDelivery` writes a policy into tensors of an engine, and proves that it arrived.

    deliver:   wake -> prepare what is carried -> [write weights and carried -> arrive -> finite? -> verify carried
               -> audit] -> reset prefix cache
    generate:  require_whole -> verify: nobody has written to the engine since

Errors inside the brackets leave an engine that holds parts of two policies: `require_whole` raises until a delivery
succeeds. Ranks agree on such an error, so that all of them raise it, and repeat a write once after a RuntimeError. An
error outside of the brackets is raised by one rank, which enters no further collective: the others wait in theirs
until the launcher ends the job.

Ranks deliver together, but generate apart: with tools one rank takes more turns than another. So `verify` is a
collective of the ranks that share an engine, and of no others.

The interface of any delivery, also of one to an engine in another process, is `engine.protocol.Delivery`.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.recipe import FP8Recipe

from .audit import ReduceMax, Replicas, audit
from .pieces import Layout
from .policy_checks import require_finite
from .records import CarriedValue, SyncReport, Tensors
from .shards import GatherFailed
from .writer import Writer


logger = logging.getLogger(__name__)


class Engine(Protocol):
    """An engine that is written in place. Its methods are called in this order and raise `RuntimeError`."""

    layout: Layout  # where its weights are

    def wake(self) -> bool: ...  # have memory for the weights, if asleep; True: what was there is lost
    def arrive(self) -> None: ...  # take what was written, if its workers are other processes; tried twice, as writing
    def reset_prefix_cache(self) -> None: ...  # forget what was computed with other weights


@dataclass
class TensorGroup:
    """Tensors of an engine that are written together."""

    layout: Layout
    tensors: Tensors | None  # the policy's tensors for all of `layout` but buffers; None until they are given
    one_by_one: bool = False  # see `Writer`
    survives_sleep: bool = False  # the engine brings it back itself when it wakes
    seal: list[int] | None = None  # checksums of what the engine holds; None unless that is the policy's
    fp8_weights: int = 0  # this and the next two are as in `SyncReport`, of the last write
    weight_relative_error: float = 0.0
    dead_blocks: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Return the size of the part in the engine on this rank, scales included."""
        return sum(tensor.nbytes for tensor in self.layout.held.values())


class InPlaceDelivery:
    """One engine, which holds no policy yet, and the policy `model` that it follows."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        recipe: FP8Recipe,
        *,
        frozen: Sequence[TensorGroup] = (),  # not trained: written once, with the first delivery or before
        one_by_one: bool = False,  # see `Writer`
        replicas: Replicas | None = None,  # the ranks that have to hold the same; None on one process
        carried: CarriedValue | None = None,
    ):
        self._engine, self._model, self._recipe, self._replicas = engine, model, recipe, replicas
        self._reduce_max = replicas and replicas.reduce_max
        names = set(engine.layout.names).difference(*(part.layout.names for part in frozen))
        layout = engine.layout.part(names) if frozen else engine.layout
        self.frozen = frozen
        self._trained = TensorGroup(layout, None, one_by_one)
        self.carried = carried
        self.last: SyncReport | None = None  # of the latest delivery that succeeded
        self.failures = 0  # deliveries that failed their audit, and engines that were found changed (each raised)

    def deliver(self, tensors: Tensors, *, prepare: bool = True) -> SyncReport:
        """Bring the engine to the policy's current weights and to what is carried. With replicas a collective.

        Args:
            tensors: Of the policy, all that is trained.
            prepare: Compute anew what is carried. False: it is sent as it was last.

        Raises:
            ValueError: What is carried cannot be computed from the policy: the engine still holds the last policy,
                unless it lost it in its sleep. Or the policy holds NaN or infinities, seen while it is written.
            RuntimeError: Writing (tried twice) or the audit failed, here or on another rank.
            GatherFailed: On this rank alone, which enters no further collective.
        """
        start = time.perf_counter()
        if self._engine.wake():
            for part in self._parts:
                part.seal = part.seal if part.survives_sleep else None
        # One rank may have found its frozen parts changed: then all send them again. They come first, because a policy
        # that shares its base with the engine runs on them while it is calibrated
        missing = [int(part.seal is None) for part in self.frozen]
        missing = self._largest(missing, self._reduce_max) if missing else []
        due = [part for part, is_missing in zip(self.frozen, missing, strict=True) if is_missing]
        writing = sum(self.send(part) for part in due)
        started = time.perf_counter()
        if prepare and self.carried is not None:
            try:
                self.carried.prepare()
            except ValueError:
                # The usual reason is a weight that is not finite, and this error names it. It uses no collective:
                # other ranks may still be in one of `prepare`, and would take this rank's numbers for those of it
                require_finite(self._model)
                raise
        prepared = time.perf_counter()
        carried = self.carried if self.carried is not None and self.carried.value is not None else None
        self._trained.tensors = tensors
        writing += self.send(self._trained, carried)
        try:
            self._engine.reset_prefix_cache()
        except RuntimeError:
            self._trained.seal = None
            raise
        parts, sent = self._parts, [*due, self._trained]
        self.last = SyncReport(
            seconds=time.perf_counter() - start,
            quantize_seconds=writing,
            prepare_seconds=prepared - started,
            audited_tensors=sum(len(part.seal) for part in sent),
            bytes_sent=sum(part.bytes for part in sent),
            fp8_weights=sum(part.fp8_weights for part in parts),
            weight_relative_error=max(part.weight_relative_error for part in parts),
            dead_blocks={name: count for part in parts for name, count in part.dead_blocks.items()},
            carried={carried.name: carried.value} if carried else {},
        )
        return self.last

    def send(self, part: TensorGroup, carried: CarriedValue | None = None) -> float:
        """Write a part and what is carried, and prove that they arrived. Returns `quantize_seconds` of `SyncReport`.
        Raises as `deliver`.
        """
        start = time.perf_counter()
        part.seal = None
        writer = self._written(part, carried)
        seconds = time.perf_counter() - start
        part.weight_relative_error, part.dead_blocks = writer.inspect(self._reduce_max)
        try:
            part.seal = self._proven(part, writer, carried)
        except RuntimeError:
            self.failures += 1
            raise
        part.fp8_weights = writer.fp8_weights
        return seconds

    @property
    def _parts(self) -> list[TensorGroup]:
        return [*self.frozen, self._trained]

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
        # If one rank raised alone, those that share its engine would wait for it
        broken = self._largest([int(change is not None) for change in changes], of_engine)
        if any(broken):
            self.failures += 1
            for part, is_broken in zip(self._parts, broken, strict=True):
                part.seal = None if is_broken else part.seal
            theirs = "another rank's part of the engine has changed since the last sync: see its log."
            raise next(filter(None, changes), None) or RuntimeError(theirs)

    def _change(self, part: TensorGroup) -> RuntimeError | None:
        """Return the error that names what changed in a part on this rank since it was sent; None if nothing did."""
        try:  # the layout raises, too, if a parameter was replaced by one of another shape
            if changed := part.layout.changed(part.seal):
                raise RuntimeError(
                    f"{len(changed)} tensors of the engine have changed since the last sync: {listed(changed, 12)}. "
                    "Something other than the sync wrote to them (a callback, a hook, memory that was handed out "
                    "twice), so that the engine would sample from another policy. Nothing was sampled; the next sync "
                    "repairs it."
                )
            if part is self._trained and self.last.carried:
                self.carried.verify()
        except RuntimeError as error:
            return error

    def _written(self, part: TensorGroup, carried: CarriedValue | None) -> Writer:
        """Write weights and what is carried, on all ranks. All repeat it once if one fails with a RuntimeError."""
        for is_last in (False, True):
            # Free a failed attempt first: its error holds tensors, and it may have failed for lack of memory
            writer = error = None
            writer = Writer(part.layout, self._recipe, one_by_one=part.one_by_one)
            error = self._write(part, writer, carried)
            severity = 0
            if error is not None:
                severity = 1 if isinstance(error, RuntimeError) else 2
            [worst] = self._largest([severity], self._reduce_max)
            if worst == 0:
                return writer
            error = error or RuntimeError("weight sync failed on another rank, whose log says why.")
            if worst == 2 or is_last:
                raise error
            logger.warning(f"weight sync failed and is repeated once: {error}")

    def _largest(self, codes: list[int], reduce_max: ReduceMax | None) -> list[int]:
        """Return the largest of each code over the ranks of `reduce_max`; None: this rank alone. The host waits."""
        if reduce_max is None:
            return codes
        # The backend reduces tensors on the engine's device. The policy may be on the host, before FSDP2 shards it
        engine = next(iter(self._trained.layout.held.values()))
        found = torch.tensor(codes, device=engine.device)
        reduce_max(found)
        return found.tolist()

    def _write(self, part: TensorGroup, writer: Writer, carried: CarriedValue | None) -> Exception | None:
        """Write once. An error is returned and not raised, so that ranks can agree on what to do next."""
        buffers = persistent_buffers(self._model) if part is self._trained else ()
        try:
            with part.tensors() as parameters:
                try:
                    writer.write(parameters, buffers)
                except Exception:
                    # Each parameter may be a collective: other ranks wait in the next one for this rank
                    for _ in parameters if self._replicas else ():
                        pass
                    raise
            if carried:
                carried.write()
            self._engine.arrive()
        except GatherFailed:
            raise
        except Exception as error:
            return error

    def _proven(self, part: TensorGroup, writer: Writer, carried: CarriedValue | None) -> list[int]:
        """Return the seal of what was written; `RuntimeError` if anything did not arrive, on any rank."""
        lost = None
        try:
            if carried:
                carried.verify()
        except RuntimeError as error:
            lost = error
        digests = {carried.name: carried.digest()} if carried else {}
        try:
            seal = audit(part.layout, writer, digests, self._replicas, carried_arrived=lost is None)
        except RuntimeError as differs:
            lost = lost or differs
        # Each rank of an engine audits its own part, so that one may find an error that no other finds
        [failed] = self._largest([int(lost is not None)], self._reduce_max)
        if failed:
            raise lost or RuntimeError("weight sync failed its audit on another rank, whose log says what differs.")
        return seal
