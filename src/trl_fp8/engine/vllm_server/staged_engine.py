"""`StagedEngine`: vLLM servers as a delivery sees them. A delivery writes into staged tensors, and workers copy them.

    [write]              the delivery writes into the staged tensors
    arrive               find what has changed; each server (server_link.py) gets a patch, or the whole policy
    layout.sums          checksums of what the workers hold, for the audit
    reset_prefix_cache   let the servers generate again

Only the first rank of a job talks to servers. Other ranks stage the same tensors, and the audit compares them. All
ranks raise an error of a server, because a rank that raised alone would leave the others waiting. `on_first` sends the
error to all ranks. `arrive`, `layout.changed` and `scales.verify` raise on the first rank alone: their caller, the
delivery, then makes all ranks raise (sync/delivery.py).

Staged tensors are one FP8 copy of the model on each rank, on the device of the policy. The first rank also has a file
in shared memory, with what was sent last. If the audit of the latest sync has passed, and no tensor was found changed
since, the workers get a patch (weight_patches.py), else the whole policy by a transport (transports.py).

If there are several servers, a lost server is left out until a sync reaches it again. Any other error of a server
stops the sync.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.quantization.formats import ActivationScaling
from trl_fp8.recipe.from_model import outline_of, persistent_buffers
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.pieces import Layout

from .client import ServerGone
from .plugin import FOLDER
from .served_model import differences, shapes_beside
from .server_link import Control, Push, ServerLink
from .staging import StagingFile, arranged, pieces_of, size_of, views
from .weight_patches import Patch, bring_up_to_date


logger = logging.getLogger(__name__)  # only the rank that talks to servers logs


class StagedLayout(Layout):
    """Layout of whole staged tensors. On the first rank `sums` returns checksums of what the servers' workers hold."""

    def __init__(self, tensors: dict[str, torch.Tensor], engine: "StagedEngine"):
        super().__init__(pieces_of(tensors))
        self.device = next(iter(tensors.values())).device
        self._engine = engine
        self._failure: RuntimeError | None = None  # error of the latest `sums`

    def sums(self) -> torch.Tensor:
        """Return the checksum `[n]` of each tensor. If a server gives none, log a warning and return wrong checksums.

        An audit calls this between collectives, where a single rank must not raise.
        """
        self._failure = None
        if not self._engine.servers:
            return super().sums()
        try:
            return torch.tensor(self._engine.worker_sums(), device=self.device)
        except Exception as error:
            self._failure = RuntimeError(str(error))  # raised by `changed`; a delivery handles no other class
            logger.warning(str(error))
            return ~super().sums()

    @property
    def blame(self) -> str:
        return self._engine.blame

    def staged_sums(self) -> list[int]:
        """Return the checksum of each tensor as it is staged on this rank."""
        return super().sums().tolist()

    def changed(self, seal: Sequence[int]) -> list[str]:
        names = super().changed(seal)
        if self._failure is not None:
            raise self._failure
        return names


class StagedScales:
    """`engine.protocol.KVScaleStore`: scales travel with the weights, and every worker returns its scales."""

    def __init__(self, engine: "StagedEngine"):
        self._engine = engine
        self.value: KVScales | None = None  # the scales that the next push sends

    def write(self, scales: KVScales) -> None:
        self.value = scales

    def verify(self, scales: KVScales) -> None:
        for server in self._engine.serving:
            for rank, state in enumerate(server.states):
                if state["kv_wrong"]:
                    raise RuntimeError(f"worker {rank} of {server.base_url}: {state['kv_wrong']}")
                if state["kv_scales"] != scales.values.tolist():
                    raise RuntimeError(f"KV cache scales did not arrive in worker {rank} of {server.base_url}.")


class StagedEngine:
    """`sync.delivery.Engine` whose workers are those of servers.

    Args:
        controls: Clients of the servers; empty on all ranks but the first.
        policy: The model that the servers follow.
        recipe: The policy's recipe, with the servers' tensor parallel size.
        folder: Folder for the staged file; workers that see it read it there.
        patience: Seconds to wait for a server that does not answer.
        device: The policy's device, on which the staged tensors are; None: CPU.
        of_first: Returns the first rank's argument on all ranks. Collective.
        parts: Parts of features, which may add tensors to the policy's.
        transport: Value of the flag `vllm_server_transport`.

    `ValueError` on all ranks if a server does not fit policy and recipe, or computes otherwise than the first server.
    """

    def __init__(
        self,
        controls: Sequence[Control],
        policy: nn.Module,
        recipe: FP8Recipe,
        folder: str,
        patience: float,
        device: torch.device | None = None,
        of_first: Callable[[Any], Any] = lambda value: value,
        parts: Sequence[EnginePart] = (),
        transport: str = "auto",
    ):
        self._controls = controls
        self._policy = policy
        self._recipe = recipe
        self._patience = patience
        self._of_first = of_first
        self._parts = parts
        self._transport = transport
        self.base_url = ", ".join(control.base_url for control in controls) or "the server"
        self.scales = StagedScales(self)
        self.servers: list[ServerLink] = []
        self.serving: list[ServerLink] = []  # servers that took part in the latest sync and are not lost since
        # Version of the file and of the latest push. The first rank starts with the highest version that any earlier
        # trainer sent to a server
        self.version = 0
        self.pause_seconds = 0.0  # slowest server of the latest sync: from /pause to the answer of /resume
        # Bytes sent to a server in the latest sync (mean over servers), divided by the bytes of all tensors
        self.patch_over_whole = 1.0
        self.served_by = 0  # number of servers that the latest sync has reached
        self.blame = ""  # which servers hold which wrong tensors by the latest checksums, see `Layout`
        self._lost: list[ServerLink] = []  # lost servers that a warning has named
        described = self.on_first(self._describe)
        self.numerics = EngineNumerics(
            kernels=described["kernels"],
            linears=ActivationScaling(*described["linears"]) if described["linears"] else None,
            query_rounded=described["query_rounded"],
        )
        # The servers may have layers that the policy lacks (for adapters beside an FP8 base). `added` are facts about
        # these layers (`Added.facts`), `beside` maps the name of each of their tensors to its shape
        self.added: dict[str, list] = described["added"]
        self.beside = shapes_beside(self.base_url, parts, self.added)
        forms = self._forms(described["tensors"])
        self.context = described["context"]  # tokens of the longest sequence that a server takes
        self._file: StagingFile | None = None  # first rank only; removed with this object, or when the process ends
        table, size = arranged(forms)
        self._staged = torch.zeros(size, dtype=torch.uint8, device=device)
        self.on_first(lambda: self._stage(folder, forms))
        self.layout = StagedLayout(views(self._staged, table), self)

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Return on all ranks what `action` returns on the first one, or raise its error on all. Collective."""
        result = error = None
        if self._controls:
            try:
                result = action()
            except (RuntimeError, ValueError) as failed:
                error = failed
            except Exception as failed:  # a rank that raised alone would leave the others waiting
                error = RuntimeError(f"{self.base_url}: {type(failed).__name__}: {failed}")
        result, error = self._of_first((result, error))
        if error is not None:
            raise error
        return result

    def _describe(self) -> dict:
        """Connect to all servers, and return what describes each of them. `ValueError` if they differ."""

        def connect(control: Control) -> ServerLink:
            return ServerLink(
                control,
                policy=self._policy,
                recipe=self._recipe,
                patience=self._patience,
                parts=self._parts,
                transport=self._transport,
            )

        with ThreadPoolExecutor(len(self._controls)) as executor:
            connecting = [executor.submit(connect, control) for control in self._controls]
        self.servers = self.serving = [future.result() for future in connecting]
        self.version = max(server.latest_version for server in self.servers)
        first = self.servers[0]
        for index, server in enumerate(self.servers):
            same = [other.base_url for other in self.servers[:index] if other.instances == server.instances]
            if same:
                raise ValueError(
                    f"vllm_server_base_url: {same[0]} and {server.base_url} are one server. Name each of them once."
                )
            different = differences(first.described, server.described)
            if different:
                raise ValueError(
                    f"{server.base_url} computes otherwise than {first.base_url}: {different} ({first.base_url}, "
                    f"{server.base_url}). Start them with the same flags, on hosts of one kind."
                )
        return first.described

    def _stage(self, folder: str, forms: dict[str, tuple[str, list[int]]]) -> None:
        try:
            self._file = StagingFile(folder, forms)
        except OSError as error:
            raise ValueError(
                f"{FOLDER}={folder!r}: the staged weights cannot be created there ({error.strerror}). Set it, and "
                "--folder of trl-fp8 serve, to a folder in memory with room for one FP8 copy of the model."
            ) from error
        for server in self.servers:
            server.choose_transport(self._file, self._staged)

    def _forms(self, dtypes: dict[str, str]) -> dict[str, tuple[str, list[int]]]:
        """Return engine name -> (dtype in the servers, whole shape in the policy) of each tensor."""
        recipe = self._recipe
        forms = {}
        shapes = dict(outline_of(self._policy).parameters) | self.beside
        shapes |= {name: buffer.shape for name, buffer in persistent_buffers(self._policy)}
        for name, shape in shapes.items():
            engine_name = recipe.engine_name(name)
            forms[engine_name] = dtypes[engine_name], list(shape)
            if name in recipe.fp8_tensors:
                forms[recipe.scale_name(name)] = recipe.format.scale_dtype, list(recipe.format.scale_shape(shape))
        return forms

    def kv_scales(self) -> StagedScales:
        return self.scales

    def wake(self) -> bool:
        """Return False, as if no weights were lost. `arrive` finds out whether a server was started again."""
        return False

    def arrive(self) -> None:
        """Let the workers copy what has changed. They generate nothing until `reset_prefix_cache`.

        Each server that answers takes part, also one that was lost. `ServerGone` if none does.
        """
        if not self.servers:
            return
        base = self.version
        # Update the file before the servers pause, because the update would prolong the pause
        is_patch_wanted = any(server.proven == base for server in self.servers)
        try:
            patch = self._bring_file_up_to_date(is_patch_wanted)
        except BaseException:  # the file may be newer than what workers hold: a patch would miss that
            for server in self.servers:
                server.distrust()
            raise
        push = self.next_push(patch)
        patience = self._patience
        if len(self.servers) > 1:
            self._wait_for_one()
            patience = 0  # do not let the others wait for a lost server
        self.serving = list(self.servers)
        self._on_each(lambda server: server.receive(push, patience))
        first = self.serving[0]
        for server in self.serving:
            if server.constants != first.constants:
                raise ValueError(
                    f"{server.base_url} has other buffers than {first.base_url}, such as tables of rotary angles. "
                    "Start both with the same model and flags."
                )

    def _bring_file_up_to_date(self, is_patch_wanted: bool) -> Patch | None:
        """Copy the staged tensors to the file. Return a patch with the changes of the file, if it is wanted and small
        enough. None: the whole policy has to be sent.
        """
        patch = None
        if is_patch_wanted:
            patch = bring_up_to_date(self._file.buffer, self._staged, self._file.table)
        else:
            self._file.buffer.copy_(self._staged)
        self._file.flush()
        return patch

    def _wait_for_one(self) -> None:
        """Wait until a server answers. `ServerGone` if none does."""
        end = time.monotonic() + self._patience
        while True:
            is_last_attempt = time.monotonic() > end
            for server in self.servers:
                try:
                    server.control.wait_until_up(0)
                    return
                except ServerGone as error:
                    latest_error = error
            if is_last_attempt:
                raise latest_error
            time.sleep(0.2)

    def _on_each(self, action: Callable[[ServerLink], Any]) -> list:
        """Call `action` in parallel for each server in `serving`, and return the results. A lost server is left out.

        `ServerGone` if none is left. Any other error of a server is raised.
        """

        def attempt(server: ServerLink) -> tuple[Any, Exception | None]:
            try:
                return action(server), None
            except Exception as error:
                return None, error

        servers = self.serving
        with ThreadPoolExecutor(len(servers)) as executor:
            outcomes = list(executor.map(attempt, servers))
        for server, (_, error) in zip(servers, outcomes, strict=True):
            if isinstance(error, ServerGone) and len(self.servers) > 1:
                self.leave_out(server, str(error))
            elif error is not None:
                raise error
        if not self.serving:
            _, first_error = outcomes[0]
            raise first_error
        return [result for result, error in outcomes if error is None]

    def leave_out(self, server: ServerLink, reason: str) -> None:
        """Do without a server until a sync reaches it again."""
        server.forget()
        self.serving = [each for each in self.serving if each is not server]
        if server not in self._lost:
            self._lost.append(server)
            logger.warning(f"{server.base_url} is left out until a sync reaches it again: {reason}")

    def next_push(self, patch: Patch | None = None) -> Push:
        """Return the push that brings workers to the file's next version."""
        self.version += 1
        scales = None if self.scales.value is None else self.scales.value.values.tolist()
        return Push(self._file, self._staged, self.version, scales, patch, base=self.version - 1)

    def worker_sums(self) -> list[int]:
        """Return the checksum of each tensor in `layout.names` as all servers hold it (`ServerLink.sums`). Where
        servers or their workers differ, return a checksum that the staged tensor does not have. Also sets `blame`.
        """
        elements = {name: tensor.numel() for name, tensor in self.layout.held.items()}
        sums_by_server = self._on_each(lambda server: server.sums(elements))
        self.blame = ""
        agreed: list[int | None] = []  # the checksum of each tensor; None where servers or workers differ
        for sums_of_tensor in zip(*sums_by_server, strict=True):
            is_same = len(set(sums_of_tensor)) == 1
            agreed.append(sums_of_tensor[0] if is_same else None)
        if None not in agreed:
            return agreed
        # Name the wrong tensors of each server, then replace None
        staged = self.layout.staged_sums()
        for server, sums in zip(self.serving, sums_by_server, strict=True):
            by_name = zip(elements, sums, staged, strict=True)
            wrong = [name for name, worker_sum, staged_sum in by_name if worker_sum != staged_sum]
            if wrong and len(self.servers) > 1:
                self.blame += f" At {server.base_url}: {listed(wrong, 4)}."
        for index, staged_sum in enumerate(staged):
            if agreed[index] is None:
                agreed[index] = ~staged_sum
        return agreed

    def reset_prefix_cache(self) -> None:
        """Let the servers generate with what has arrived. Collective."""
        self.pause_seconds, self.version, self.patch_over_whole, self.served_by = self.on_first(self._resume)

    def _resume(self) -> tuple[float, int, float, int]:
        """Resume the servers. Return `pause_seconds`, `version`, `patch_over_whole`, `served_by`."""
        seconds = max(self._on_each(ServerLink.resume))
        for server in self.serving:
            if server in self._lost:
                self._lost.remove(server)
                logger.warning(f"{server.base_url} takes part again.")
        bytes_of_policy = size_of(self._file.table)
        bytes_sent = 0
        for server in self.serving:
            bytes_sent += bytes_of_policy if server.patch is None else len(server.patch.body)
        patch_over_whole = bytes_sent / bytes_of_policy / len(self.serving)
        return seconds, self.version, patch_over_whole, len(self.serving)
