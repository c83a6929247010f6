"""`InPlaceDelivery` writes a policy into tensors of an engine, and proves that it arrived.

    deliver:   wake -> prepare the carried value -> [write weights and carried value -> arrive -> finite?
               -> verify the carried value -> audit] -> reset prefix cache
    generate:  require_whole -> verify that nothing has written to the engine since

The *carried value* goes to the engine beside the weights (scales of an FP8 KV cache, see records.py).

An error inside the brackets leaves an engine that holds parts of two policies, so `require_whole` raises until a
delivery succeeds. All ranks raise such an error together. If a write fails with a RuntimeError, they first repeat it
once. An error outside of the brackets is raised by one rank alone, which enters no further collective. The other ranks
wait in the next collective until the launcher ends the job.

Ranks deliver together, but they generate independently: with tools one rank takes more turns than another. So only the
ranks that share an engine call `verify` as a collective.

`InPlaceDelivery` has the interface `engine.protocol.Delivery`, as deliveries to engines in other processes do.
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
    """An engine that is written in place. A delivery calls its methods in this order. Failures are `RuntimeError`s."""

    layout: Layout  # the places of its weights

    def wake(self) -> bool:
        """Allocate the weights' memory again if the engine sleeps. Return whether the weights' values are lost."""

    def arrive(self) -> None:
        """Make workers in other processes copy what was written. If it fails, write and call are repeated once."""

    def reset_prefix_cache(self) -> None:
        """Drop everything in caches that was computed with earlier weights."""


@dataclass
class TensorGroup:
    """Tensors of an engine that are written together, and what is known of the last write."""

    layout: Layout
    tensors: Tensors | None  # source of the tensors for all of `layout` except buffers; None until `deliver` sets it
    one_by_one: bool = False  # whether the source may change a tensor when it yields the next one, see `Writer`
    survives_sleep: bool = False  # whether the engine restores the tensors itself when it wakes
    seal: list[int] | None = None  # checksums of the audited tensors; None: the engine may hold other tensors
    audited: Layout | None = None  # layout to audit if other groups arrive together with this group; None: `layout`
    # The last write of this group, as in `SyncReport`
    fp8_weights: int = 0
    weight_relative_error: float = 0.0
    dead_blocks: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Return the size of the tensors in the engine on this rank, scales included."""
        return sum(tensor.nbytes for tensor in self.layout.held.values())

    @property
    def sealed(self) -> Layout:
        """Return the layout whose checksums are in `seal`."""
        return self.audited or self.layout


class InPlaceDelivery:
    """Delivery of the policy `model` to one engine, which holds no policy yet."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        recipe: FP8Recipe,
        *,
        # Groups of tensors that are not trained. Each is written once, with the first delivery or before
        frozen: Sequence[TensorGroup] = (),
        one_by_one: bool = False,  # see `Writer`
        # Whether a write puts tensors into staging buffers, from which `Engine.arrive` takes them. Frozen groups then
        # arrive with the trained tensors, and all groups are audited together
        staged: bool = False,
        replicas: Replicas | None = None,  # the ranks whose engines must hold the same policy; None on one process
        carried: CarriedValue | None = None,
    ):
        self._engine = engine
        self._model = model
        self._recipe = recipe
        self._replicas = replicas
        self._reduce_max = replicas.reduce_max if replicas else None
        layout = engine.layout
        if frozen:
            trained = set(engine.layout.names)
            for group in frozen:
                trained -= set(group.layout.names)
            layout = engine.layout.part(trained)
        audited = engine.layout if staged else None
        self.frozen = frozen
        self._staged = staged
        self._trained = TensorGroup(layout, tensors=None, one_by_one=one_by_one, audited=audited)
        self.carried = carried
        self.last: SyncReport | None = None  # report of the latest delivery that succeeded
        self.failures = 0  # number of deliveries that failed their audit, or whose engine was later found changed

    def deliver(self, tensors: Tensors, *, prepare: bool = True) -> SyncReport:
        """Write the policy's current weights and the carried value to the engine, and prove that they arrived.

        Collective, if there are replicas.

        Args:
            tensors: Source of all trained tensors of the policy.
            prepare: Whether to compute the carried value anew. False: the last value is sent again.

        Raises:
            ValueError: The carried value cannot be computed from the policy; the engine still holds the last policy,
                unless it lost that in its sleep. Or the write found NaN or infinities in the policy.
            RuntimeError: Writing (tried twice) or the audit failed, on this rank or another.
            GatherFailed: A gather failed. Raised on this rank alone, which must enter no further collective.
        """
        start = time.perf_counter()
        if self._engine.wake():
            for group in self._groups:
                if not group.survives_sleep:
                    group.seal = None
        # All ranks send a frozen group if any rank has no seal of the group: a rank may have found its engine changed.
        # Frozen groups come first: a policy that shares its base with the engine computes with them in `prepare`
        unsealed = []
        if self.frozen:
            flags = self._largest([int(group.seal is None) for group in self.frozen], self._reduce_max)
            unsealed = [group for group, flag in zip(self.frozen, flags, strict=True) if flag]
        quantize_seconds = sum(self.send(group) for group in unsealed)
        prepare_start = time.perf_counter()
        if prepare and self.carried is not None:
            try:
                self.carried.prepare()
            except ValueError:
                # The usual reason is a weight that is not finite, which this check names. The check uses no
                # collective: other ranks may still wait in a collective of `prepare`, and would mistake it for theirs
                require_finite(self._model)
                raise
        prepare_seconds = time.perf_counter() - prepare_start
        carried = self.carried
        if carried is not None and carried.value is None:  # there is no value to send yet
            carried = None
        self._trained.tensors = tensors
        quantize_seconds += self.send(self._trained, carried)
        try:
            self._engine.reset_prefix_cache()
        except RuntimeError:
            self._trained.seal = None
            raise
        groups = self._groups
        sent = [*unsealed, self._trained]
        audited = [self._trained] if self._staged else sent  # if staged, the seal of the trained group covers all
        dead_blocks = {}
        for group in groups:
            dead_blocks |= group.dead_blocks
        self.last = SyncReport(
            seconds=time.perf_counter() - start,
            quantize_seconds=quantize_seconds,
            prepare_seconds=prepare_seconds,
            audited_tensors=sum(len(group.seal) for group in audited),
            bytes_sent=sum(group.bytes for group in sent),
            fp8_weights=sum(group.fp8_weights for group in groups),
            weight_relative_error=max(group.weight_relative_error for group in groups),
            dead_blocks=dead_blocks,
            carried={carried.name: carried.value} if carried else {},
        )
        return self.last

    def repeat(self) -> None:
        """Make a restarted engine take the tensors of the latest delivery, and prove that it did. No collective.

        Raises:
            RuntimeError: The latest delivery failed, the engine does not answer, or it holds other tensors.
        """
        self.require_whole()
        self._engine.arrive()
        for group in self._groups:
            change = self._error_if_changed(group)
            if change is not None:
                group.seal = None
                self.failures += 1
                raise change
        self._engine.reset_prefix_cache()

    def send(self, group: TensorGroup, carried: CarriedValue | None = None) -> float:
        """Write a group and the carried value, and prove that they arrived. Return `quantize_seconds` of `SyncReport`.

        Raises what `deliver` raises.
        """
        start = time.perf_counter()
        group.seal = None
        writer = self._write(group, carried)
        quantize_seconds = time.perf_counter() - start
        group.weight_relative_error, group.dead_blocks = writer.inspect(self._reduce_max)
        try:
            group.seal = self._prove(group, writer, carried)
        except RuntimeError:
            self.failures += 1
            raise
        group.fp8_weights = writer.fp8_weights
        return quantize_seconds

    @property
    def _groups(self) -> list[TensorGroup]:
        return [*self.frozen, self._trained]

    def require_whole(self) -> None:
        """Raise `RuntimeError` unless the latest delivery succeeded."""
        if any(group.seal is None for group in self._groups):
            raise RuntimeError(
                "the engine holds no complete policy: weights were never synced, or the last sync failed. Call "
                "sync_weights() first."
            )

    def verify(self) -> None:
        """Raise `RuntimeError` unless the engine still holds what was delivered. Called before each generation.

        A collective of the ranks that share this engine.
        """
        self.require_whole()
        changes = [self._error_if_changed(group) for group in self._groups]
        reduce_max = self._replicas.reduce_max_of_engine if self._replicas else None
        # All ranks of an engine raise together: a rank that raised alone would leave the others waiting
        has_changed = self._largest([int(change is not None) for change in changes], reduce_max)
        if any(has_changed):
            self.failures += 1
            for group, changed_anywhere in zip(self._groups, has_changed, strict=True):
                if changed_anywhere:
                    group.seal = None
            for change in changes:
                if change is not None:
                    raise change
            raise RuntimeError("another rank's part of the engine has changed since the last sync: see its log.")

    def _error_if_changed(self, group: TensorGroup) -> RuntimeError | None:
        """Return an error that names the tensors of a group that changed on this rank since the sync, or None."""
        try:  # `Layout.changed` raises, too, if a parameter was replaced by one of another shape
            changed = group.sealed.changed(group.seal)
            if changed:
                raise RuntimeError(
                    f"{len(changed)} tensors of the engine have changed since the last sync: {listed(changed, 12)}."
                    f"{group.sealed.blame} Something other than the sync wrote to them (a callback, a hook, memory "
                    "that was handed out twice), so the engine would sample from another policy. Nothing was "
                    "sampled; the next sync repairs it."
                )
            if group is self._trained and self.last.carried:
                self.carried.verify()
        except RuntimeError as error:
            return error

    def _write(self, group: TensorGroup, carried: CarriedValue | None) -> Writer:
        """Write a group and the carried value. If any rank has a RuntimeError, all ranks write once more."""
        for is_last in (False, True):
            # Free a failed attempt first: its error keeps tensors alive, and it may have failed for lack of memory
            writer = error = None
            writer = Writer(group.layout, self._recipe, one_by_one=group.one_by_one)
            error = self._write_once(group, writer, carried)
            severity = 0  # 0: success; 1: an error that may not occur again; 2: any other error
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
        """Return each code's maximum over the ranks of `reduce_max` (None: this rank alone). Waits for the device."""
        if reduce_max is None:
            return codes
        # The backend can reduce tensors on the engine's device, but maybe not on the policy's: before FSDP2 shards it
        # the policy may be on the host
        any_tensor = next(iter(self._trained.layout.held.values()))
        largest = torch.tensor(codes, device=any_tensor.device)
        reduce_max(largest)
        return largest.tolist()

    def _write_once(self, group: TensorGroup, writer: Writer, carried: CarriedValue | None) -> Exception | None:
        """Write once. Return the error, so that ranks can agree on what to do next; None if the write succeeded."""
        buffers = persistent_buffers(self._model) if group is self._trained else ()
        try:
            with group.tensors() as parameters:
                try:
                    writer.write(parameters, buffers)
                except Exception:
                    if self._replicas:
                        # Exhaust the source: each parameter may need a collective, in which other ranks would wait
                        for _ in parameters:
                            pass
                    raise
            if carried:
                carried.write()
            if group is self._trained:
                self._engine.arrive()
        except GatherFailed:
            raise
        except Exception as error:
            return error

    def _prove(self, group: TensorGroup, writer: Writer, carried: CarriedValue | None) -> list[int]:
        """Return the seal of what was written. Raise `RuntimeError` on all ranks if an engine of a rank lacks any of
        what was written to it.
        """
        failure = None
        try:
            if carried:
                carried.verify()
        except RuntimeError as error:
            failure = error
        digests = {carried.name: carried.digest()} if carried else {}
        try:
            if group.audited is not None:  # `staged`: frozen groups were written before, and arrived with this group
                for frozen in self.frozen:
                    any_tensor = next(iter(frozen.layout.held.values()))
                    sums = torch.tensor(frozen.seal, device=any_tensor.device)
                    writer.sums.update(zip(frozen.layout.names, sums.unbind(), strict=True))
            seal = audit(group.sealed, writer, digests, self._replicas, carried_arrived=failure is None)
        except RuntimeError as error:
            failure = failure or error
        # Each rank of an engine audits its own part of the weights, so one rank may find an error that others do not
        [failed] = self._largest([int(failure is not None)], self._reduce_max)
        if failed:
            raise failure or RuntimeError("weight sync failed its audit on another rank, whose log says what differs.")
        return seal
