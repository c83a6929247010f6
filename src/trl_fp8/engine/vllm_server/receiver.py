"""The worker's side of a server: it writes what a trainer sends into the engine's tensors, and reports what they hold.

`Receiver` is a weight transfer engine of vLLM's, whose calls return nothing. `WorkerExtension` answers RPCs with
strings, numbers, lists and dictionaries: a result that msgpack cannot encode ends the engine's output thread.

Nothing here raises after the start. With several workers vLLM 0.31 stops reading answers at the first error (PR
#57846), and then takes the remaining answers for answers to the next call. So `Receiver` keeps errors, and `fp8_state`
returns them. Each answer repeats the number of its call.

The order of calls: `describe`; `init_transfer_engine` for each trainer; and for each sync `start_weight_update`,
`receive_weights`, `finish_weight_update` and `state`.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import torch
import vllm
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.platforms import current_platform

from trl_fp8.engine.vllm.layout import Added, constants_layout, engine_layout
from trl_fp8.engine.vllm.numerics import (
    activation_scaling,
    attention_layers,
    fp8_kernels,
    keep_untiled_scales,
    quantizes_query,
    require_auditable,
)
from trl_fp8.engine.vllm.scale_copies import KVScaleCopies, fp8_attention_layers
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.sync.pieces import Layout

from . import weight_patches
from .broadcast import received
from .cuda_ipc import opened_tensors, why_unreached
from .numbers import numbers_of
from .plugin import DEFAULT_FOLDER, FOLDER, SCALES
from .staging import ALIGNED, Table, content, read, size_of


class Receiver(WeightTransferEngine):
    """One worker's end of a transfer. `RuntimeError` at the start if a sync cannot write what a kernel reads."""

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, *args):
        super().__init__(*args)
        keep_untiled_scales(self.model)
        require_auditable(self.model)
        self.instance = uuid.uuid4().hex  # a restarted worker has another value, and no policy
        self.version = -1  # version of the policy in the engine; -1 during an update, and after a failed update
        self.latest_version = 0  # highest version that a trainer has sent, even if writing it failed
        self.error = ""  # text of the latest update's error
        self.layout = self.constants = Layout([])
        # Checksum of each whole tensor as this worker read it. After a patch: checksum of the part that the engine
        # holds, padded with zeros to the whole tensor
        self.arrived: dict[str, int] = {}
        self.parts: dict[str, int] = {}  # checksum of this worker's part of each tensor
        # Tensor whose checksum in `arrived` is that of a part -> [which part, number of elements in this part]
        self.split: dict[str, list] = {}
        self.seconds = 0.0  # CPU time of the latest update
        self._trainer = ""  # name of the trainer that connected last
        self._table: Table = {}
        self._written = -1  # version that `_write` has written; -1 while it writes, and if it failed
        self._patched: set[str] = set()  # tensors that a patch has changed since `state` computed checksums
        self._scale_copies: KVScaleCopies | None = None
        self._scales: KVScales | None = None

    def describe(self, linears: list[str], buffers: list[str]) -> dict:
        """Return how this worker's engine computes, and its tensors. Also sets `layout` and `constants`.

        `linears` and `buffers` are the engine's names of the policy's linears and buffers.
        """
        of_policy = engine_layout(self.model, set(linears), set(buffers))
        layers = [module for module in self.model.modules() if isinstance(module, Added)]
        pieces = list(of_policy.pieces.values())
        facts_of_added = {}
        for layer in layers:
            pieces += layer.pieces()
            facts_of_added |= layer.facts()
        self.layout = Layout(pieces)
        self.constants = constants_layout(self.model, self.layout)
        scaling = activation_scaling(self.model)
        fp8_cache = []  # layers with an FP8 cache
        for layer, module in attention_layers(self.model).items():
            if module.kv_cache_dtype.startswith("fp8"):
                fp8_cache.append(layer)
        sent = [piece for piece in self.layout.pieces.values() if piece.derived is None]
        return {
            "instance": self.instance,
            "latest_version": self.latest_version,
            "kernels": dict(fp8_kernels(self.model)),
            "linears": None if scaling is None else list(scaling),
            "scale_format": os.environ.get(SCALES),
            "host": [current_platform.get_device_name(), vllm.__version__, str(torch.__version__)],  # plain strings
            "query_rounded": bool(quantizes_query(self.model)),
            "fp8_cache": fp8_cache,
            "context": self.vllm_config.model_config.max_model_len,
            "numbers": numbers_of(self.vllm_config.model_config.hf_text_config),
            "tensors": {piece.name: str(piece.dtype).removeprefix("torch.") for piece in sent},
            "derived": [piece.name for piece in self.layout.derived],
            "added": facts_of_added,
        }

    def sees(self, path: str, text: str) -> str:
        """Return why this worker does not read a trainer's file with this text; empty if it does."""
        try:
            _require_in_folder(path)
            found = content(path, len(text))
        except ValueError as error:
            return str(error)
        if found != text.encode():
            return f"{path} has another content"
        return ""

    def most_bytes(self) -> int:
        """Return the most bytes of a trainer's file with what this worker holds of a policy; 0 before `describe`."""
        return sum(tensor.nbytes + ALIGNED for tensor in self.layout.held.values())

    def state(self) -> dict:
        """Return version, error and checksums of what this worker holds now.

        Checksums are strings, because not every JSON reader has integers of 64 bits.
        """
        wrong_scales = ""
        if self._scales is not None:
            try:
                self._scale_copies.verify(self._scales)
            except RuntimeError as error:
                wrong_scales = str(error)
        sums = dict(zip(self.layout.names, self.layout.sums().tolist(), strict=True))
        self._note_patched(sums)
        return {
            "instance": self.instance,
            "version": self.version,
            "error": self.error,
            "arrived": {name: str(checksum) for name, checksum in self.arrived.items()},
            "split": self.split,
            "differ": [name for name, checksum in sums.items() if checksum != self.parts.get(name)],
            "constants": [str(checksum) for checksum in self.constants.sums().tolist()],
            "kv_scales": None if self._scales is None else self._scales.values.tolist(),
            "kv_wrong": wrong_scales,
            "cpu_seconds": self.seconds,
        }

    def _note_patched(self, sums: Mapping[str, int]) -> None:
        """Compute checksums of patched tensors from what the engine holds: the trainer compares them with its own."""
        if not self._patched:
            return
        tensors = self.layout.held  # read once: each access looks up all parameters
        for name in self._patched:
            _, shape, _ = self._table[name]
            piece = self.layout.pieces[name]
            self.parts[name] = self.arrived[name] = sums[name]
            if not weight_patches.covers(piece, shape):  # this worker holds a part of the tensor
                whole, elements = weight_patches.padded_to_whole(piece, tensors[name], shape)
                self.arrived[name] = int(digest(whole))
                self.split[name] = [str((piece.sent, piece.zero)), elements]
        self._patched = set()

    # -- vLLM's WeightTransferEngine

    def parse_init_info(self, init_dict: dict) -> dict:
        """Return `init_dict` unchecked: `init_transfer_engine` keeps its errors."""
        return init_dict

    def parse_update_info(self, update_dict: dict) -> dict:
        """Return `update_dict` unchecked: `receive_weights` keeps its errors."""
        return update_dict

    def init_transfer_engine(self, init_info: dict) -> None:
        self.error = ""
        self._note_errors(lambda: self._connect(**init_info))

    def start_weight_update(self) -> None:
        self.error = ""
        self.version = -1  # until all is written, this worker holds parts of two policies

    @torch.no_grad()
    def receive_weights(self, update_info: dict) -> None:
        self._note_errors(lambda: self._write(**update_info))

    def finish_weight_update(self) -> None:
        self.version = -1 if self.error else self._written

    def shutdown(self) -> None:
        """Do nothing: files are open, and groups of ranks exist, only during an update."""

    def _note_errors(self, work: Callable[[], None]) -> None:
        """Call `work`, and keep its error for `state`: see the module's docstring."""
        try:
            work()
        except Exception as error:  # of any kind: a worker that raises would shift vLLM's later answers
            self.error = f"{type(error).__name__}: {error}"

    def _connect(self, trainer: str, table: Table, kv_layers: list[int] = (), skip_layers: list[int] = ()) -> None:
        """Accept updates of this trainer only. `kv_layers` cache k and v; the cache of `skip_layers` is BF16."""
        self._scale_copies = None
        if kv_layers:
            self._scale_copies = KVScaleCopies(fp8_attention_layers(self.model, kv_layers, skip_layers))
        self._scales = None
        self._written = -1
        self._trainer = trainer
        self._table = table

    def _write(
        self,
        trainer: str,
        version: int,
        kv_scales: list[list[float]] | None = None,
        whole: dict | None = None,
        patch: dict | None = None,
    ) -> None:
        """Write a whole policy, or the changes of a patch."""
        if trainer != self._trainer:
            raise RuntimeError(f"another trainer has connected to this server since ({self._trainer or 'none'}).")
        start = time.process_time()
        self.latest_version = max(self.latest_version, version)
        tensors = self.layout.held  # read once: each access looks up all parameters
        if patch is None:
            self._written = -1
            self._write_whole(whole, tensors)
        elif version != self._written:  # equal if the patch arrives a second time
            self._write_patch(tensors, **patch)
        self._written = -1
        for piece in self.layout.derived:
            values = piece.derived()
            tensors[piece.name].copy_(values)
            self.parts[piece.name] = int(digest(values))
        if kv_scales is not None:
            self._scales = KVScales(torch.tensor(kv_scales))
            self._scale_copies.write(self._scales)
        self.seconds = time.process_time() - start
        self._written = version

    def _write_whole(self, whole: dict, tensors: Mapping[str, torch.Tensor]) -> None:
        self.arrived = {}
        self.parts = {}
        self.split = {}
        self._patched = set()
        with closing(self._sent(**whole)) as sent:
            for name, found in sent:
                tensor = found.to(self.device)
                part = self.layout.pieces[name].of_sent(tensor)
                # Checksums of what was read, not of the engine's copy: the trainer compares `arrived` with what it
                # staged, and `state` compares `parts` with what the engine holds
                self.arrived[name] = int(digest(tensor))
                if part is tensor:  # this worker holds the whole tensor
                    self.parts[name] = self.arrived[name]
                else:
                    self.parts[name] = int(digest(part))
                tensors[name].copy_(part.view_as(tensors[name]))

    def _sent(
        self, file: str = "", broadcast: dict | None = None, cuda_ipc: list[dict] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over `(name, tensor)` of a whole policy, from the transport whose argument is set."""
        if broadcast is not None:
            return received(self._table, self.device, self.parallel_config.rank + 1, **broadcast)
        if cuda_ipc is not None:
            return opened_tensors(self._table, cuda_ipc[self.parallel_config.rank])
        _require_in_folder(file)
        return read(file, self._table)

    def _write_patch(
        self, tensors: Mapping[str, torch.Tensor], file: str, size: int, sha256: str, counts: list, base: int
    ) -> None:
        """Write the patch in `file`. An error before its first element is written leaves the policy unchanged."""
        if base != self._written or base < 0:
            raise RuntimeError(f"the patch changes version {base}, and this worker holds version {self._written}.")
        _require_in_folder(file)
        if size > size_of(self._table):
            raise ValueError(f"a patch of {size} bytes is larger than all that it could change.")
        found = weight_patches.decoded(content(file, size), sha256, counts, self._table)
        self._written = -1
        for name, changes in found.items():
            _, shape, _ = self._table[name]
            weight_patches.write(self.layout.pieces[name], tensors[name], changes, shape)
        self._patched |= found.keys()


def _require_in_folder(path: str) -> None:
    """Raise `ValueError` unless a trainer's file is in the folder of this server."""
    folder = Path(os.environ.get(FOLDER, DEFAULT_FOLDER)).resolve()
    if Path(path).resolve().parent != folder:
        raise ValueError(
            f"{path} is not in {folder}, the only folder that this server reads. Set {FOLDER}={folder} for the "
            "trainer, or start trl-fp8 serve with --folder."
        )


class WorkerExtension:
    """Methods that vLLM adds to every worker, for `/collective_rpc`."""

    weight_transfer_engine: Receiver

    def fp8_instance(self, number: int) -> dict:
        return _answer(number, lambda: {"instance": self.weight_transfer_engine.instance})

    def fp8_describe(self, number: int, linears: list[str], buffers: list[str]) -> dict:
        return _answer(number, lambda: self.weight_transfer_engine.describe(linears, buffers))

    def fp8_state(self, number: int) -> dict:
        return _answer(number, self.weight_transfer_engine.state)

    def fp8_sees(self, number: int, path: str, text: str) -> dict:
        return _answer(number, lambda: {"why_not": self.weight_transfer_engine.sees(path, text)})

    def fp8_reaches(self, number: int, transport: str, gpu: str) -> dict:
        device = self.weight_transfer_engine.device
        return _answer(number, lambda: {"why_not": why_unreached(transport, gpu, device)})

    def fp8_bytes(self) -> int:
        """Return `Receiver.most_bytes` to the guard. After an error return 0, with which the guard takes no upload."""
        answer = _answer(0, lambda: {"bytes": self.weight_transfer_engine.most_bytes()})
        return answer.get("bytes", 0)

    def fp8_begin(self) -> None:
        """Forget an update that a trainer left open: vLLM's worker would raise at the start of the next one."""
        self._weight_update_active = False


def _answer(number: int, question: Callable[[], dict]) -> dict:
    """Return `number` and what `question` returns; or, if it raises, `number` and the text of the error ("failed")."""
    try:
        return {"number": number, **question()}
    except Exception as error:  # of any kind, as in `_note_errors`
        return {"number": number, "failed": f"{type(error).__name__}: {error}"}
