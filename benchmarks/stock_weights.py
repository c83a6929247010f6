"""TRL's way of weights to a vLLM server, with shared memory in place of NCCL, which a CPU lacks.

Start, finish and the loading of weights are those of vLLM's `NCCLWeightTransferEngine`. The trainer writes BF16
tensors into a file, while the update is open, as TRL broadcasts them then.
"""

import os
import time
from contextlib import closing
from pathlib import Path

import torch
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from testing import forked_server
from trl_fp8.engine.vllm_server.staging import StagingFile, opened


BACKEND = "file"
WORDS = ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}', "--load-format", "dummy", "--dtype", "bfloat16"]
WORDS += ["--max-model-len", "64", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**27)]
WORDS += ["--distributed-executor-backend", "uni", "--enforce-eager"]


class Loader(WeightTransferEngine):
    """The server's side."""

    init_info_cls, update_info_cls = dict, dict

    def parse_init_info(self, init_dict: dict) -> dict:
        return init_dict

    def parse_update_info(self, update_dict: dict) -> dict:
        return update_dict

    def init_transfer_engine(self, init_info: dict) -> None: ...
    def shutdown(self) -> None: ...
    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: dict) -> None:
        with closing(opened(update_info["path"], update_info["table"])) as weights:
            self.model.load_weights(weights.items())


def start(model: str, folder: Path) -> forked_server.ForkedServer:
    """Return a server in BF16 that waits for weights."""

    def register() -> None:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "Loader")

    return forked_server.fork(
        model, folder, WORDS, {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}, register
    )


class Sender:
    """The trainer's side, for one model of FP32 or BF16 weights."""

    def __init__(self, server: forked_server.ForkedServer, model: nn.Module):
        self.control = server.control("")
        self.model = model
        forms = {name: ("bfloat16", list(weight.shape)) for name, weight in model.named_parameters()}
        self.file = StagingFile(server.folder, forms)
        self.bytes = os.stat(self.file.path).st_size

    @torch.no_grad()
    def sync(self) -> float:
        """Send all weights as TRL does, and return the seconds in which the server cannot generate."""
        begin = time.perf_counter()
        self.control.start_weight_update()
        for name, weight in self.model.named_parameters():
            self.file.tensors[name].copy_(weight)
        self.control.update_weights({"path": self.file.path, "table": self.file.table})
        self.control.finish_weight_update(None)
        if not self.control.reset_prefix_cache():
            raise RuntimeError("the server did not reset its prefix cache")
        return time.perf_counter() - begin
