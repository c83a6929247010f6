"""The worker's side of a server: it writes what a trainer staged into the engine's tensors, and reports what it holds.

`Receiver` is vLLM's weight transfer engine, whose calls return nothing. `WorkerExtension` answers RPCs with strings,
numbers, lists and dictionaries: a result that msgpack cannot encode ends the engine's output thread.

Nothing here raises. With several workers vLLM 0.31 stops reading answers at the first error (PR #57846), and then
takes the remaining ones for answers to the next call. Errors are kept, and `fp8_state` returns them. Each answer
repeats the number of its question.
"""

import os
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

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

from .numbers import numbers_of
from .plugin import DEFAULT_FOLDER, FOLDER
from .staging import Table, opened


class Receiver(WeightTransferEngine):
    """One worker's end of a transfer. `RuntimeError` at a start with kernels that do not keep what is sent."""

    init_info_cls, update_info_cls = dict, dict
    supports_draft_weight_update = False

    def __init__(self, *args):
        super().__init__(*args)
        keep_untiled_scales(self.model)
        require_auditable(self.model)
        self.instance = uuid.uuid4().hex  # a restarted worker has another one, and holds nothing
        self.version = -1  # of the latest update that was written whole
        self.error = ""  # of the latest update
        self.layout = self.constants = Layout([])
        self.arrived: dict[str, int] = {}  # checksums of whole tensors as they were read
        self.parts: dict[str, int] = {}  # checksums of this worker's parts of them
        self.seconds = 0.0  # of CPU, that the latest update took
        self._path = ""  # of the file of the trainer that connected last
        self._table: Table = {}
        self._written = -1
        self._scale_copies: KVScaleCopies | None = None
        self._scales: KVScales | None = None

    def describe(self, linears: list[str], buffers: list[str]) -> dict:
        """Return what this worker's engine is. `linears` and `buffers`: the policy's, by the engine's names."""
        of_policy = engine_layout(self.model, set(linears), set(buffers))
        added = [piece for module in self.model.modules() if isinstance(module, Added) for piece in module.pieces()]
        self.layout = Layout([*of_policy.pieces.values(), *added])
        self.constants = constants_layout(self.model, self.layout)
        scaling = activation_scaling(self.model)
        sent = [piece for piece in self.layout.pieces.values() if piece.derived is None]
        return {
            "instance": self.instance,
            "kernels": dict(fp8_kernels(self.model)),
            "linears": None if scaling is None else list(scaling),
            "query_rounded": bool(quantizes_query(self.model)),
            "fp8_cache": [
                layer
                for layer, module in attention_layers(self.model).items()
                if module.kv_cache_dtype.startswith("fp8")
            ],
            "context": self.vllm_config.model_config.max_model_len,
            "numbers": numbers_of(self.vllm_config.model_config.hf_text_config),
            "tensors": {piece.name: str(piece.dtype).removeprefix("torch.") for piece in sent},
            "derived": [piece.name for piece in self.layout.derived],
        }

    def state(self) -> dict:
        """Return what this worker holds now. Checksums are strings: not every JSON reader has integers of 64 bits."""
        wrong_scales = ""
        if self._scales is not None:
            try:
                self._scale_copies.verify(self._scales)
            except RuntimeError as error:
                wrong_scales = str(error)
        return {
            "instance": self.instance,
            "version": self.version,
            "error": self.error,
            "arrived": {name: str(checksum) for name, checksum in self.arrived.items()},
            "differ": self.layout.changed([self.parts.get(name, -1) for name in self.layout.names]),
            "constants": [str(checksum) for checksum in self.constants.sums().tolist()],
            "kv_scales": None if self._scales is None else self._scales.values.tolist(),
            "kv_wrong": wrong_scales,
            "cpu_seconds": self.seconds,
        }

    # -- vLLM's WeightTransferEngine

    def parse_init_info(self, init_dict: dict) -> dict:
        """Return it unchecked: errors are noted by `init_transfer_engine`."""
        return init_dict

    def parse_update_info(self, update_dict: dict) -> dict:
        """Return it unchecked: errors are noted by `receive_weights`."""
        return update_dict

    def init_transfer_engine(self, init_info: dict) -> None:
        self.error = ""
        self._note_errors(lambda: self._connect(**init_info))

    def start_weight_update(self) -> None:
        self.error = ""
        self.version = -1  # until all is written, this worker holds parts of two policies

    @torch.no_grad()
    def receive_weights(self, update_info: dict) -> None:
        self._written = -1
        self._note_errors(lambda: self._write(**update_info))

    def finish_weight_update(self) -> None:
        self.version = -1 if self.error else self._written

    def shutdown(self) -> None:
        """Do nothing: no file is open, no group of ranks exists."""

    def _note_errors(self, work: Callable[[], None]) -> None:
        """Call `work`, and keep its error for `state`: see the module's docstring."""
        try:
            work()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _connect(self, path: str, table: Table, kv_layers: list[int] = (), skip_layers: list[int] = ()) -> None:
        """Open the file of a trainer. `kv_layers` have k and v in a cache; that of `skip_layers` is BF16."""
        folder = Path(os.environ.get(FOLDER, DEFAULT_FOLDER)).resolve()
        if Path(path).resolve().parent != folder:
            raise ValueError(
                f"{path} is not in {folder}, the only folder that this server reads. Set {FOLDER}={folder} for the "
                "trainer, or start trl-fp8 serve with --folder."
            )
        opened(path, table).close()
        self._scale_copies = None
        if kv_layers:
            self._scale_copies = KVScaleCopies(fp8_attention_layers(self.model, kv_layers, skip_layers))
        self._scales = None
        self._path = path
        self._table = table

    def _write(self, path: str, version: int, kv_scales: list[list[float]] | None = None) -> None:
        if path != self._path:
            raise RuntimeError(f"another trainer has connected to this server since ({self._path or 'none'}).")
        start = time.process_time()
        tensors = self.layout.held  # once: each access looks for all parameters anew
        self.arrived = {}
        self.parts = {}
        with closing(opened(path, self._table)) as staged:  # an open file would keep the memory of a dead trainer's
            for name, on_host in staged.items():
                tensor = on_host.to(self.device)
                part = self.layout.pieces[name].of_sent(tensor)
                # Checksums of what was read, not of the copy: the trainer compares the first with what it staged, and
                # `state` the second with what the engine holds
                self.arrived[name] = int(digest(tensor))
                self.parts[name] = self.arrived[name] if part is tensor else int(digest(part))
                tensors[name].copy_(part.view_as(tensors[name]))
        for piece in self.layout.derived:
            values = piece.derived()
            tensors[piece.name].copy_(values)
            self.parts[piece.name] = int(digest(values))
        if kv_scales is not None:
            self._scales = KVScales(torch.tensor(kv_scales))
            self._scale_copies.write(self._scales)
        self.seconds = time.process_time() - start
        self._written = version


class WorkerExtension:
    """Methods of every worker, for vLLM's `/collective_rpc`."""

    weight_transfer_engine: Receiver

    def fp8_instance(self, number: int) -> dict:
        return _answer(number, lambda: {"instance": self.weight_transfer_engine.instance})

    def fp8_describe(self, number: int, linears: list[str], buffers: list[str]) -> dict:
        return _answer(number, lambda: self.weight_transfer_engine.describe(linears, buffers))

    def fp8_state(self, number: int) -> dict:
        return _answer(number, self.weight_transfer_engine.state)

    def fp8_begin(self) -> None:
        """Forget an update that a trainer left open: vLLM's worker would raise at the start of the next."""
        self._weight_update_active = False


def _answer(number: int, question: Callable[[], dict]) -> dict:
    """Return the answer with its question's number, or the error under "failed"."""
    try:
        return {"number": number, **question()}
    except Exception as error:
        return {"number": number, "failed": f"{type(error).__name__}: {error}"}
