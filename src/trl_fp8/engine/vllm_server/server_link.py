"""`ServerLink`: a trainer's link to one vLLM server. It sends the policy, and checks what the workers hold.

A sync calls `receive`, which connects, begins an update and pushes; then `sums`, which the audit compares with the
staged tensors; then `resume`.
"""

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.recipe.from_model import caches_of, persistent_buffers
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.outline import kv_layers_of
from trl_fp8.recipe.recipe import FP8Recipe

from .client import ServerGone
from .cuda_ipc import gpu_of
from .served_model import (
    differences,
    require_cache,
    require_numbers,
    require_scale_format,
    require_tensors,
    shapes_beside,
)
from .staging import PatchFile, StagingFile
from .transports import Bodies, Broadcast, CudaIpc, Folder, Transport
from .weight_patches import Patch


logger = logging.getLogger(__name__)  # only the rank that talks to servers logs


class Control(Protocol):
    """A client of a server. Each method raises `RuntimeError` if the server refuses, `ServerGone` if none answers."""

    base_url: str

    def wait_until_up(self, seconds: float) -> None: ...
    def rpc(self, method: str, *args: object) -> list[dict]: ...  # the answer of each worker
    def init_weight_transfer_engine(self, init_info: dict) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict) -> None: ...
    def finish_weight_update(self, weight_version: str) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def upload(self, kind: str, offset: int, size: int, chunk: bytes) -> str: ...  # raises `OSError` without room


@dataclass(frozen=True)
class Push:
    """The policy of one sync, in the forms in which servers can get it."""

    file: StagingFile  # holds the whole policy of `version`
    staged: torch.Tensor  # the same bytes, on the policy's device
    version: int
    kv_scales: list[list[float]] | None
    patch: Patch | None = None  # turns version `base` into `version`; None: the whole policy has to be sent
    base: int | None = None


class ServerLink:
    """One server. Waits `patience` seconds for it at first. `ValueError` if it does not fit policy and recipe."""

    def __init__(
        self,
        control: Control,
        policy: nn.Module,
        recipe: FP8Recipe,
        patience: float,
        parts: Sequence[EnginePart] = (),
        transport: str = "auto",
    ):
        self.control = control
        self._policy = policy
        self._recipe = recipe
        self._parts = parts
        self._transport_flag = transport
        self.base_url = control.base_url
        self.states: list[dict] = []  # the workers' latest `Receiver.state`
        self.constants: list[list[str]] = []  # checksums of buffers that no sync writes, by worker
        self.patch: Patch | None = None  # the patch that the latest push sent; None: the push sent the whole policy
        # The version that the workers hold according to an audit; None: not known. `resume` sets it, because a caller
        # resumes only after its audit has passed
        self.proven: int | None = None
        self.latest_version = 0  # highest version that any trainer had sent when the workers were last described
        self._version = 0  # version of the latest push
        self._paused_at: float | None = None
        self._instances: list[str] | None = None  # `Receiver.instance` of the workers that know the staged file
        self._states_are_fresh = False  # `push` has just fetched `states`, so `sums` need not
        self._answering: list[str] = []  # `Receiver.instance` of the workers that were last described
        self.described = self._describe(patience)
        self.transport: Transport | None = None
        self._patches: Transport | None = None  # brings patches; if the flag is "auto", the same as `transport`

    def _describe(self, patience: float) -> dict:
        """Return what `Receiver.describe` returns in all workers. Raise if they differ or do not fit the policy."""
        self.control.wait_until_up(patience)
        buffers = [self._recipe.engine_name(name) for name, _ in persistent_buffers(self._policy)]
        answers = self.control.rpc("fp8_describe", sorted(self._recipe.linears), buffers)
        self._answering = [answer.pop("instance") for answer in answers]
        self.latest_version = max(answer.pop("latest_version") for answer in answers)
        first = answers[0]
        for rank, answer in enumerate(answers):
            different = differences(first, answer)
            if different:
                raise RuntimeError(
                    f"worker {rank} of {self.base_url} differs from the first one: {different}. Start the server "
                    "again."
                )
        beside = shapes_beside(self.base_url, self._parts, first["added"])
        require_tensors(self.base_url, self._policy, self._recipe, first["tensors"], beside)
        require_scale_format(self.base_url, self._recipe, first["scale_format"])
        require_cache(self.base_url, set(self._cached_layers()), self._recipe, first["fp8_cache"])
        require_numbers(self.base_url, self._policy, first["numbers"])
        return first

    def _cached_layers(self) -> list[int]:
        """Return the layers that cache k and v. Return no layers if the recipe's cache is not FP8."""
        if not self._recipe.fp8_kv_cache:
            return []
        caches = caches_of(self._policy.config.get_text_config())
        return list(kv_layers_of(caches))

    def receive(self, push: Push, patience: float) -> None:
        """Let the workers copy a push. They generate nothing until `resume`. Waits `patience` seconds for them."""
        proven = self.proven
        self.proven = None  # until an audit of this push has passed
        is_known = self.connect(push, patience)
        # A patch is for workers that are known to hold the version that it changes. Others get the whole policy
        takes_patch = is_known and proven is not None and proven == push.base
        self.patch = push.patch if takes_patch else None
        with self.sent(push) as sent:
            self.begin()
            self.push(push, sent)

    @contextmanager
    def sent(self, push: Push) -> Iterator[dict]:
        """Yield the argument `patch` or `whole` of `Receiver._write`, by which the workers find the patch or the whole
        policy. The whole policy is sent if there is no patch, or no room for it.
        """
        patch = self.patch
        sent = {}
        with ExitStack() as transfer:
            if patch is not None:
                try:
                    path = transfer.enter_context(self.transport.patch(push.file, patch.body))
                    sent["patch"] = {
                        "file": path,
                        "size": len(patch.body),
                        "sha256": patch.sha256,
                        "counts": patch.counts,
                        "base": push.base,
                    }
                except OSError as error:
                    logger.warning(
                        f"a patch of {len(patch.body)} bytes was not written ({error}): all is sent instead."
                    )
                    self.patch = None
            if self.patch is None:
                sent["whole"] = transfer.enter_context(self.transport.whole(push.file, push.staged))
            yield sent

    def begin(self) -> None:
        """Pause the server and start an update. From now on its workers hold no complete policy."""
        if self._paused_at is None:  # a repeated push is already paused: keep its first start
            self._paused_at = time.perf_counter()
        self.control.pause()
        self.control.start_weight_update()

    def push(self, push: Push, sent: dict) -> None:
        """Let the workers copy what `self.sent` yields.

        `RuntimeError` if a worker has an error, or another version afterwards. With a patch also if a tensor had
        changed before.
        """
        self._version = push.version
        self._states_are_fresh = False
        update = {"trainer": push.file.path, "version": push.version, "kv_scales": push.kv_scales}
        self.control.update_weights(update | sent)
        self.control.finish_weight_update(weight_version=str(push.version))
        self._ask()
        self._states_are_fresh = True
        self._require_version()
        different = sorted({name for state in self.states for name in state["differ"]})
        if different and "patch" in sent:
            raise RuntimeError(f"{self.base_url}: tensors had changed before a patch came: {listed(different, 4)}.")

    def choose_transport(self, file: StagingFile, staged: torch.Tensor) -> None:
        """Choose how bytes come to the workers: in the trainer's files if all workers see them, else in HTTP bodies.

        If the flag is not "auto", its transport brings whole policies, and files or bodies bring only patches.
        `ValueError` if that transport does not reach a worker.
        """
        flag = self._transport_flag
        if flag != "auto":
            for rank, answer in enumerate(self.control.rpc("fp8_reaches", flag, gpu_of(staged))):
                if answer["why_not"]:
                    raise ValueError(
                        f"vllm_server_transport={flag!r}: worker {rank} of {self.base_url} {answer['why_not']}."
                    )
        # Try whether the workers can read a file in the trainer's folder
        folder = os.path.dirname(file.path)
        text = secrets.token_hex(16)
        probe = PatchFile(folder, text.encode())
        try:
            answers = self.control.rpc("fp8_sees", probe.path, text)
        finally:
            probe.remove()
        reasons = [answer["why_not"] for answer in answers if answer["why_not"]]
        before = self._patches
        if reasons:
            self._patches = Bodies(self.control, reasons[0])
        else:
            self._patches = Folder(folder)
        self.transport = self._patches
        if flag == "broadcast":
            self.transport = Broadcast(self.base_url, len(answers), self._patches)
        elif flag == "cuda_ipc":
            self.transport = CudaIpc(len(answers), self._patches)
        if before is not None and type(before) is not type(self._patches):
            logger.warning(f"Weights travel to {self.base_url} by {self.transport.name} from now on.")

    def connect(self, push: Push, patience: float) -> bool:
        """Tell the workers the table of the staged file, unless they know it. Return whether they knew it already.

        Workers that were started again are described and checked as at first. `ValueError` if they compute otherwise.
        """
        self.control.wait_until_up(patience)
        answering = [answer["instance"] for answer in self.control.rpc("fp8_instance")]
        if answering == self._instances:
            return True
        described = self._describe(patience)
        different = differences(self.described, described)
        if different:
            raise ValueError(
                f"{self.base_url} was started again and computes otherwise than before: {different} (before, now). "
                "Start it with the flags that it had."
            )
        self.choose_transport(push.file, push.staged)
        self.control.init_weight_transfer_engine(
            {
                "trainer": push.file.path,  # a name: whether a worker reads the file depends on the transport
                "table": push.file.table,
                "kv_layers": self._cached_layers(),
                "skip_layers": list(self._recipe.kv_cache_skip_layers),
            }
        )
        self._ask()
        constants = [state["constants"] for state in self.states]
        if self.constants and constants != self.constants:
            raise ValueError(
                f"{self.base_url} was started again with other buffers than before, such as tables of rotary angles. "
                "Start it with the model and the flags that it had."
            )
        self._instances = self._answering
        self.constants = constants
        return False

    def _ask(self) -> None:
        """Fetch `states`. `RuntimeError` if a worker has an error; the next `connect` then describes all workers
        again.
        """
        self.states = self.control.rpc("fp8_state")
        errors = [f"worker {rank}: {state['error']}" for rank, state in enumerate(self.states) if state["error"]]
        if errors:
            self._instances = None
            raise RuntimeError(f"{self.base_url}: {listed(errors, 4)}")

    def _require_version(self) -> None:
        """Raise `RuntimeError` unless all workers hold the version that was sent last."""
        versions = sorted({state["version"] for state in self.states})
        if versions != [self._version]:
            raise RuntimeError(
                f"{self.base_url} holds versions {versions} of the policy, and version {self._version} was sent last. "
                "Is it the server of another trainer, too?"
            )

    def sums(self, elements: dict[str, int]) -> list[int | None]:
        """Return the checksum of each whole tensor as all workers read it. `elements`: name -> number of elements.

        A checksum is None if workers disagree, if parts of the tensor are missing, or if a worker's tensor has changed
        since it was written.

        Raises:
            ServerGone: The server was started again since the latest push.
            RuntimeError: A worker has an error or another version. Or tensors have changed that no sync sends
                (constant buffers and derived tensors).
        """
        proven = self.proven
        self.proven = None  # until nothing below speaks against it
        if not self._states_are_fresh:
            self._ask()
        self._states_are_fresh = False
        if [state["instance"] for state in self.states] != self._instances:
            self._instances = None
            raise ServerGone(f"{self.base_url} was started again since the last sync, and holds no policy.")
        self._require_version()
        if [state["constants"] for state in self.states] != self.constants:
            raise RuntimeError(f"{self.base_url}: buffers that no sync writes have changed. Start the server again.")
        different = {name for state in self.states for name in state["differ"]}
        derived = sorted(different.intersection(self.described["derived"]))
        if derived:
            raise RuntimeError(f"{self.base_url}: tensors that the engine derives have changed: {listed(derived, 4)}.")
        sums = [None if name in different else self._agreed_sum(name, count) for name, count in elements.items()]
        if not different and None not in sums:  # `different` may also name tensors that are not staged
            self.proven = proven
        return sums

    def _agreed_sum(self, name: str, elements: int) -> int | None:
        """Return the checksum of a whole tensor of `elements` elements; None if workers disagree or parts are missing.

        None and not 0, because 0 is the checksum of zeros.
        """
        counts: dict[str, int] = {}  # which part of the tensor -> its number of elements
        checksums: dict[str, int] = {}  # which part of the tensor -> its checksum
        for state in self.states:
            if name not in state["arrived"]:
                return None
            checksum = int(state["arrived"][name])
            part, count = state["split"].get(name, ("all", elements))
            if part in counts and (counts[part], checksums[part]) != (count, checksum):
                return None  # two workers hold the same part, and differ
            counts[part] = count
            checksums[part] = checksum
        if sum(counts.values()) != elements:
            return None
        total = sum(checksums.values())
        return (total + 2**63) % 2**64 - 2**63  # checksums are int64, and wrap modulo 2**64 when they are added

    def resume(self) -> float:
        """Let the server generate. Return the seconds of the pause."""
        if not self.control.reset_prefix_cache():
            raise RuntimeError(
                f"{self.base_url} did not reset its prefix cache after a weight sync: cached prefixes of the old "
                "weights would be reused. Do not send it requests while it is paused."
            )
        self.control.resume()
        seconds = time.perf_counter() - self._paused_at
        self._paused_at = None
        self._states_are_fresh = False
        self.proven = self._version
        return seconds

    @property
    def instances(self) -> list[str]:
        """Return `Receiver.instance` of the workers that were last described."""
        return self._answering

    def distrust(self) -> None:
        """Make the next sync send the whole policy instead of a patch."""
        self.proven = None

    def forget(self) -> None:
        """Forget what the workers know. The server is gone, and the next sync finds a new server, which needs the
        table of the staged file and the whole policy.
        """
        self._instances = None
        self.proven = None
        self._paused_at = None
