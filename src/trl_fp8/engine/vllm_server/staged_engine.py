"""`StagedEngine`: a vLLM server as a delivery sees it. A delivery writes into staged tensors, and workers copy them.

    [write]              into staged tensors on this host, checksums noted
    arrive               connect if the server is another process than last time; begin, push
    layout.sums          checksums of what the workers hold, if they read what was staged
    reset_prefix_cache   let the server generate again

Only the first rank of a job talks to the server. Other ranks stage the same tensors, and the audit compares them. An
error of the server is raised on all ranks, or inside of what they agree on: one that raised alone would leave the
others waiting. Staged tensors are one FP8 copy of the model on each rank: on the device of the policy, and of the
first rank also in a file in shared memory. A policy on CPU is written straight into the file.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.quantization.formats import ActivationScaling
from trl_fp8.recipe.from_model import caches_of, outline_of, persistent_buffers
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.outline import kv_layers
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.pieces import Layout

from .numbers import numbers_of
from .plugin import FOLDER
from .staging import StagingFile, pieces_of, zeros


logger = logging.getLogger(__name__)  # of the one rank that talks to the server
FP8 = "float8_e4m3fn"


class Control(Protocol):
    """A client of a server. Each method raises `RuntimeError` if the server does not answer, or refuses."""

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
        if self._engine.control is None:
            return super().sums()
        try:
            return torch.tensor(self._engine.worker_sums(), device=self.device)
        except Exception as error:
            self._failure = RuntimeError(str(error))  # as a delivery expects, from all ranks
            logger.warning(str(error))
            return torch.zeros(len(self.names), dtype=torch.int64, device=self.device)

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
        for rank, state in enumerate(self._engine.states):
            if state["kv_wrong"]:
                raise RuntimeError(f"worker {rank} of {self._engine.base_url}: {state['kv_wrong']}")
            if state["kv_scales"] != scales.values.tolist():
                raise RuntimeError(f"KV cache scales did not arrive in worker {rank} of {self._engine.base_url}.")


class StagedEngine:
    """`sync.delivery.Engine` whose workers are those of a server.

    Args:
        control: Client of the server; None on all ranks but the first.
        policy: The model that the server follows.
        recipe: With the server's tensor parallel size.
        folder: Of the staged file, which server and trainer share.
        patience: Seconds to wait for a server that does not answer.
        device: Where the policy is written before it is copied to the file; None: into the file itself, on CPU.
        of_first: Returns the first rank's argument on all ranks. Collective.

    `ValueError` on all ranks for a server whose tensors are not those of policy and recipe.
    """

    def __init__(
        self,
        control: Control | None,
        policy: nn.Module,
        recipe: FP8Recipe,
        folder: str,
        patience: float,
        device: torch.device | None = None,
        of_first: Callable[[Any], Any] = lambda value: value,
    ):
        self.control, self._policy, self._recipe = control, policy, recipe
        self._patience, self._of_first = patience, of_first
        self.base_url = control.base_url if control is not None else "the server"
        self.scales = StagedScales(self)
        self.states: list[dict] = []  # of the workers, as they were last asked
        self.version = 0  # of the latest push
        self.pause_seconds = 0.0  # of the latest sync: from /pause to the answer of /resume
        self._paused_at: float | None = None
        self._instances: list[str] | None = None  # of the workers that know the staged file
        self._constants: list[list[str]] = []  # checksums of buffers that no sync writes, by worker
        self._answering: list[str] = []  # instances of the workers that were described last
        self._described = self.on_first(self._describe)
        self.numerics = EngineNumerics(
            kernels=self._described["kernels"],
            linears=ActivationScaling(*self._described["linears"]) if self._described["linears"] else None,
            query_rounded=self._described["query_rounded"],
        )
        forms = self._forms()
        self.context = self._described["context"]  # tokens of the longest sequence
        self._file: StagingFile | None = None  # on the first rank; removed when that forgets it, or ends
        self.on_first(lambda: self._stage(folder, forms))
        self._is_copied = self._file is not None and device is not None
        in_place = self._file is not None and device is None
        self.layout = StagedLayout(self._file.tensors if in_place else zeros(forms, device), self)

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Return on all ranks what `action` returns on the first one, or raise its error on all. Collective."""
        result = error = None
        if self.control is not None:
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

    def _stage(self, folder: str, forms: dict[str, tuple[str, list[int]]]) -> None:
        try:
            self._file = StagingFile(folder, forms)
        except OSError as error:
            raise ValueError(
                f"{FOLDER}={folder!r}: the staged weights cannot be created there ({error.strerror}). Set it, and "
                "--folder of trl-fp8 serve, to a folder in memory with room for one FP8 copy of the model."
            ) from error

    def _describe(self) -> dict:
        """Return how the workers compute and which tensors they hold, all of them the same ones."""
        self.control.wait_until_up(self._patience)
        buffers = [self._recipe.engine_name(name) for name, _ in persistent_buffers(self._policy)]
        answers = self.control.rpc("fp8_describe", sorted(self._recipe.linears), buffers)
        self._answering = [answer.pop("instance") for answer in answers]
        first = answers[0]
        for rank, answer in enumerate(answers):
            different = _differences(first, answer)
            if different:
                raise RuntimeError(
                    f"worker {rank} of {self.base_url} differs from the first one: {different}. Start the server "
                    "again."
                )
        self._require_tensors(first["tensors"])
        self._require_cache(first["fp8_cache"])
        self._require_numbers(first["numbers"])
        return first

    def _require_numbers(self, server: dict) -> None:
        """Raise `ValueError` if a number that no tensor shows is not that of the policy's config."""
        own = numbers_of(self._policy.config.get_text_config())
        both = own.keys() & server.keys()  # vLLM's own classes of configs have other fields
        different = _differences({name: own[name] for name in both}, {name: server[name] for name in both})
        if different:
            raise ValueError(
                f"{self.base_url} serves another model than the trainer has, in config.json: {different}. Start it "
                "with the model of the trainer."
            )

    def _require_tensors(self, server: dict[str, str]) -> None:
        """Raise `ValueError` unless the server's tensors (name -> dtype) have the names and formats of the recipe."""
        recipe = self._recipe
        fp8 = {recipe.engine_name(name) for name in recipe.fp8_tensors}
        names = {recipe.engine_name(name) for name in outline_of(self._policy).parameters}
        names |= {recipe.engine_name(name) for name, _ in persistent_buffers(self._policy)}
        scales = {recipe.scale_name(name) for name in recipe.fp8_tensors}
        names |= scales
        problems = {
            "are in the policy and not in the server": names - server.keys(),
            "are in the server and not in the policy": server.keys() - names,
            "are FP8 on one side only": {n for n in names & server.keys() if (n in fp8) != (server[n] == FP8)},
            f"are scales in another dtype than {recipe.format.scale_dtype}": {
                n for n in scales & server.keys() if server[n] != recipe.format.scale_dtype
            },
        }
        found = [
            f"{len(which)} tensors {what}: {listed(sorted(which), 4)}" for what, which in problems.items() if which
        ]
        if found:
            raise ValueError(
                f"{self.base_url} serves another model or another recipe than the trainer has: {'; '.join(found)}. "
                "Start it with the model and the FP8 flags of the trainer."
            )

    def _require_cache(self, served: list[int]) -> None:
        """Raise `ValueError` unless the server's KV cache is FP8 in the layers (`served`) in which the recipe's is."""
        expected = sorted(set(self._cached_layers()) - set(self._recipe.kv_cache_skip_layers))
        if served != expected:
            raise ValueError(
                f"{self.base_url} has an FP8 KV cache in the layers {served}, and the trainer's flags say {expected}. "
                "Start it with the trainer's --kv-cache-dtype and --kv-cache-skip-layers."
            )

    def _cached_layers(self) -> list[int]:
        """Return the layers whose k and v are in a cache, if the recipe's cache is FP8."""
        return list(kv_layers(caches_of(self._policy.config.get_text_config()))) if self._recipe.fp8_kv_cache else []

    def _forms(self) -> dict[str, tuple[str, list[int]]]:
        """Return dtype (the server's) and whole shape (the policy's) of each tensor, by its name in the engine."""
        recipe = self._recipe
        forms = {}
        shapes = dict(outline_of(self._policy).parameters)
        shapes |= {name: buffer.shape for name, buffer in persistent_buffers(self._policy)}
        for name, shape in shapes.items():
            engine_name = recipe.engine_name(name)
            forms[engine_name] = self._described["tensors"][engine_name], list(shape)
            if name in recipe.fp8_tensors:
                forms[recipe.scale_name(name)] = recipe.format.scale_dtype, list(recipe.format.scale_shape(shape))
        return forms

    def kv_scales(self) -> StagedScales:
        return self.scales

    def wake(self) -> bool:
        """Return False: whether the server is still the same is found in `arrive`, where ranks agree on errors."""
        return False

    def arrive(self) -> None:
        """Let the workers copy what is staged. They generate nothing until `reset_prefix_cache`."""
        if self.control is not None:
            if self._is_copied:
                self._copy_to_file()  # before the pause, which it would prolong
            self._connect()
            self.begin()
            self.push()

    def begin(self) -> None:
        """Pause the server, whose workers hold no whole policy from now on."""
        if self._paused_at is None:  # else this push is repeated
            self._paused_at = time.perf_counter()
        self.control.pause()
        self.control.start_weight_update()

    def push(self) -> None:
        """Let the workers copy what is staged."""
        self.version += 1
        scales = None if self.scales.value is None else self.scales.value.values.tolist()
        self.control.update_weights({"path": self._file.path, "version": self.version, "kv_scales": scales})
        self.control.finish_weight_update(weight_version=str(self.version))
        self._ask()

    def _copy_to_file(self) -> None:
        """Copy what was written on the policy's device to the file. Waits for the device."""
        written = self.layout.held
        for name, tensor in self._file.tensors.items():
            tensor.copy_(written[name])

    def _connect(self) -> None:
        """Show the staged file to the workers, unless they are those that know it."""
        self.control.wait_until_up(self._patience)
        answering = [answer["instance"] for answer in self.control.rpc("fp8_instance")]
        if answering == self._instances:
            return
        described = self._describe()
        different = _differences(self._described, described)
        if different:
            raise ValueError(
                f"{self.base_url} was started again and computes otherwise than before: {different} (before, now). "
                "Start it with the flags that it had."
            )
        self.control.init_weight_transfer_engine(
            {
                "path": self._file.path,
                "table": self._file.table,
                "kv_layers": self._cached_layers(),
                "skip_layers": list(self._recipe.kv_cache_skip_layers),
            }
        )
        self._ask()
        constants = [state["constants"] for state in self.states]
        if self._constants and constants != self._constants:
            raise ValueError(
                f"{self.base_url} was started again with other buffers than before, such as tables of rotary angles. "
                "Start it with the model and the flags that it had."
            )
        self._instances = self._answering
        self._constants = constants

    def _ask(self) -> None:
        """Get the state of the workers; `RuntimeError` if one has an error, after which all are connected anew."""
        self.states = self.control.rpc("fp8_state")
        errors = [f"worker {rank}: {state['error']}" for rank, state in enumerate(self.states) if state["error"]]
        if errors:
            self._instances = None
            raise RuntimeError(f"{self.base_url}: {listed(errors, 4)}")

    def worker_sums(self) -> list[int]:
        """Return the checksum of each whole tensor of `layout.names` as all workers read it; 0 where they read other
        ones, or where what a worker holds now is not what it made of it.
        """
        self._ask()
        if [state["instance"] for state in self.states] != self._instances:
            self._instances = None
            raise RuntimeError(f"{self.base_url} was started again since the last sync, and holds no policy.")
        versions = sorted({state["version"] for state in self.states})
        if versions != [self.version]:
            raise RuntimeError(
                f"{self.base_url} holds versions {versions} of the policy, and version {self.version} was sent last. "
                "Is it the server of another trainer, too?"
            )
        if [state["constants"] for state in self.states] != self._constants:
            raise RuntimeError(f"{self.base_url}: buffers that no sync writes have changed. Start the server again.")
        different = {name for state in self.states for name in state["differ"]}
        derived = sorted(different.intersection(self._described["derived"]))
        if derived:
            raise RuntimeError(f"{self.base_url}: tensors that the engine derives have changed: {listed(derived, 4)}.")
        sums = []
        for name in self.layout.names:
            read = {state["arrived"].get(name) for state in self.states}
            agreed = len(read) == 1 and None not in read and name not in different
            sums.append(int(read.pop()) if agreed else 0)
        return sums

    def reset_prefix_cache(self) -> None:
        """Let the server generate with what has arrived. Collective."""
        self.pause_seconds, self.version = self.on_first(self._resume)

    def _resume(self) -> tuple[float, int]:
        """Return the seconds of the pause, and the version."""
        if not self.control.reset_prefix_cache():
            raise RuntimeError(
                f"{self.base_url} did not reset its prefix cache after a weight sync: cached prefixes of the old "
                "weights would be reused. Do not send it requests while it is paused."
            )
        self.control.resume()
        seconds = time.perf_counter() - self._paused_at
        self._paused_at = None
        return seconds, self.version


def _differences(one: dict, other: dict) -> str:
    """Return names and both values of what differs, empty if nothing does. Dictionaries are compared in turn."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        values = one.get(name), other.get(name)
        if values[0] == values[1]:
            continue
        if all(isinstance(value, dict) for value in values):
            found.append(f"{name} ({_differences(*values)})")
        else:
            found.append(f"{name} {values[0]!r}, {values[1]!r}")
    return listed(found, 4)
