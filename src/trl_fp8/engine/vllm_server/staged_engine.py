"""`StagedEngine`: vLLM servers as a delivery sees them. A delivery writes into staged tensors, and workers copy them.

    [write]              into staged tensors on this host, checksums noted
    arrive               find what has changed; each server (server_link.py) gets that, or all
    layout.sums          checksums of what the workers hold, if they read what was staged
    reset_prefix_cache   let the servers generate again

Only the first rank of a job talks to servers. Other ranks stage the same tensors, and the audit compares them. An
error of a server is raised on all ranks, or inside of what they agree on: one that raised alone would leave the
others waiting. Staged tensors are one FP8 copy of the model on each rank, on the device of the policy. The first rank
also has a file in shared memory, with what was sent last. Workers get all of it, by a transport (transports.py). If
the audit of the latest sync has passed, and nothing was found changed since, they get a patch: what has changed
(weight_patches.py).

Of several servers one that is lost is left out, until a sync reaches it again. Any other error of one stops the sync.
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


logger = logging.getLogger(__name__)  # of the one rank that talks to the server


class StagedLayout(Layout):
    """Layout of staged tensors, each whole, whose checksums are those of what the server's workers hold."""

    def __init__(self, tensors: dict[str, torch.Tensor], engine: "StagedEngine"):
        super().__init__(pieces_of(tensors))
        self.device = next(iter(tensors.values())).device
        self._engine = engine
        self._failure: RuntimeError | None = None  # of the latest `sums`

    def sums(self) -> torch.Tensor:
        """Return the checksum `[n]` of each tensor; zeros, with a warning, if the server cannot be asked.

        An audit calls this between collectives, where one rank must not raise.
        """
        self._failure = None
        if not self._engine.servers:
            return super().sums()
        try:
            return torch.tensor(self._engine.worker_sums(), device=self.device)
        except Exception as error:
            self._failure = RuntimeError(str(error))  # as a delivery expects, from all ranks
            logger.warning(str(error))
            return torch.zeros(len(self.names), dtype=torch.int64, device=self.device)

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
    """`engine.protocol.KVScaleStore`: they travel with the weights, and every worker returns those that it holds."""

    def __init__(self, engine: "StagedEngine"):
        self._engine = engine
        self.value: KVScales | None = None  # staged beside the weights

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
        recipe: With the servers' tensor parallel size.
        folder: Of the staged file, which servers and trainer share.
        patience: Seconds to wait for a server that does not answer.
        device: Of the policy, which is written there before the file is brought up to date; None: CPU.
        of_first: Returns the first rank's argument on all ranks. Collective.
        parts: Of features, which may need tensors of the servers beside the policy's.
        transport: Value of the flag `vllm_server_transport`.

    `ValueError` on all ranks for a server whose tensors are not those of policy and recipe, or that computes otherwise
    than the first one.
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
        self._controls, self._policy, self._recipe = controls, policy, recipe
        self._patience, self._of_first, self._parts, self._transport = patience, of_first, parts, transport
        self.base_url = ", ".join(control.base_url for control in controls) or "the server"
        self.scales = StagedScales(self)
        self.servers: list[ServerLink] = []
        self.serving: list[ServerLink] = []  # those that have taken part in the latest sync, and are not lost since
        self.version = 0  # of the file, and of the latest push, after those of earlier trainers of the servers
        self.pause_seconds = 0.0  # of the latest sync: from /pause to the answer of /resume, of the slowest server
        self.patch_over_whole = 1.0  # bytes that the workers read in the latest sync, over those of all tensors
        self.served_by = 0  # servers that the latest sync has reached
        self.blame = ""  # of the latest checksums, see `Layout`
        self._lost: list[ServerLink] = []  # of which a warning has told
        described = self.on_first(self._describe)
        self.numerics = EngineNumerics(
            kernels=described["kernels"],
            linears=ActivationScaling(*described["linears"]) if described["linears"] else None,
            query_rounded=described["query_rounded"],
        )
        self.added: dict[str, list] = described["added"]  # facts of `Added` layers of a server
        self.beside = shapes_beside(self.base_url, parts, self.added)  # tensors that are not the policy's
        forms = self._forms(described["tensors"])
        self.context = described["context"]  # tokens of the longest sequence
        self._file: StagingFile | None = None  # on the first rank; removed when that forgets it, or ends
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
        """Connect to all servers, and return how they compute and which tensors they hold, all the same ones."""
        of_all = self._policy, self._recipe, self._patience, self._parts, self._transport
        with ThreadPoolExecutor(len(self._controls)) as executor:
            links = [executor.submit(ServerLink, control, *of_all) for control in self._controls]
        self.servers = self.serving = [link.result() for link in links]
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
        """Return dtype (the servers') and whole shape (the policy's) of each tensor, by its name in the engine."""
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
        """Return False: whether a server is still the same is found in `arrive`, where ranks agree on errors."""
        return False

    def arrive(self) -> None:
        """Let the workers copy what has changed. They generate nothing until `reset_prefix_cache`.

        Each server that answers takes part, also one that was lost. `ServerGone` if none does.
        """
        if not self.servers:
            return
        base = self.version
        # Before the pause, which it would prolong
        try:
            patch = self._bring_file_up_to_date(any(server.proven == base for server in self.servers))
        except BaseException:  # a part of the file may be newer than what workers hold: no patch would show it
            for server in self.servers:
                server.distrust()
            raise
        push = self.next_push(patch)
        patience = self._patience
        if len(self.servers) > 1:
            self._wait_for_one()
            patience = 0  # others do not wait for one that is lost
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
        """Bring the file to what is staged. Return the patch that does so; None if all has to be sent."""
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
            for server in self.servers:
                try:
                    server.control.wait_until_up(0)
                    return
                except ServerGone as error:
                    if time.monotonic() > end:
                        raise error
            time.sleep(0.2)

    def _on_each(self, action: Callable[[ServerLink], Any]) -> list:
        """Return what `action` returns for each server that serves, in parallel. One that is gone is left out.

        `ServerGone` if none is left. Another error of one server is raised.
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
            raise outcomes[0][1]
        return [result for result, error in outcomes if error is None]

    def leave_out(self, server: ServerLink, reason: str) -> None:
        """Do without a server until a sync reaches it again."""
        server.forget()
        self.serving = [each for each in self.serving if each is not server]
        if server not in self._lost:
            self._lost.append(server)
            logger.warning(f"{server.base_url} is left out until a sync reaches it again: {reason}")

    def next_push(self, patch: Patch | None = None) -> Push:
        """Return what brings workers to the file's next version."""
        self.version += 1
        scales = None if self.scales.value is None else self.scales.value.values.tolist()
        return Push(self._file, self._staged, self.version, scales, patch, base=self.version - 1)

    def worker_sums(self) -> list[int]:
        """Return the checksum of each whole tensor of `layout.names` that the workers of all servers hold; 0 where
        they differ, or where it is 0 for one of them (`ServerLink.sums`).
        """
        elements = {name: tensor.numel() for name, tensor in self.layout.held.items()}
        by_server = self._on_each(lambda server: server.sums(elements))
        self.blame = ""
        agreed = [sums[0] if len(set(sums)) == 1 else 0 for sums in zip(*by_server, strict=True)]
        if len(self.servers) > 1 and 0 in agreed:
            staged = self.layout.staged_sums()
            for server, sums in zip(self.serving, by_server, strict=True):
                wrong = [name for name, one, other in zip(elements, sums, staged, strict=True) if one != other]
                if wrong:
                    self.blame += f" At {server.base_url}: {listed(wrong, 4)}."
        return agreed

    def reset_prefix_cache(self) -> None:
        """Let the servers generate with what has arrived. Collective."""
        self.pause_seconds, self.version, self.patch_over_whole, self.served_by = self.on_first(self._resume)

    def _resume(self) -> tuple[float, int, float, int]:
        """Return the seconds of the pause, the version, `patch_over_whole`, and the number of servers."""
        seconds = max(self._on_each(ServerLink.resume))
        for server in self.serving:
            if server in self._lost:
                self._lost.remove(server)
                logger.warning(f"{server.base_url} takes part again.")
        whole = size_of(self._file.table)
        sent = sum(whole if server.patch is None else len(server.patch.body) for server in self.serving)
        return seconds, self.version, sent / whole / len(self.serving), len(self.serving)
