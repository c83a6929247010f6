"""How long a sync keeps an FP8 server from generating, beside TRL's own way of weights to a BF16 one.

    python -m benchmarks.bench_trl_weights [--syncs 6]

Both servers are vLLM's, and syncs go to them by turns, for a tiny policy and for one of 157 M parameters (random
weights). `pause_over_trl` is the ratio of each pair.

pause_seconds      from /pause to the answer of /resume: the workers' copies, their checksums, the trainer's comparison
trl_pause_seconds  TRL's calls: /start_weight_update, all weights in BF16, /finish_weight_update, /reset_prefix_cache.
                   TRL pauses nothing and compares nothing

A CPU has no NCCL, and `Loader` takes its place: start, finish and the loading of weights are those of vLLM's
`NCCLWeightTransferEngine`, which reloads layer by layer, and tensors travel through a file in shared memory. The
trainer writes them while the update is open, as TRL broadcasts them then.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import httpx
import torch
from torch import nn
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from testing import forked_server, record
from testing.engines import perturb
from testing.staged_trainer import StagedTrainer
from testing.tiny_models import save_checkpoint
from trl_fp8.engine.vllm_server.staging import StagingFile, opened


BACKEND = "file"
WORDS = ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}', "--load-format", "dummy", "--dtype", "bfloat16"]
WORDS += ["--max-model-len", "64", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**27)]
WORDS += ["--distributed-executor-backend", "uni", "--enforce-eager"]
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}


class Loader(WeightTransferEngine):
    """The server's side of TRL's way of weights."""

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
        """Send all weights as TRL does, and return the seconds from its first call to the answer of the last."""
        begin = time.perf_counter()
        self.control.start_weight_update()
        for name, weight in self.model.named_parameters():
            self.file.tensors[name].copy_(weight)
        self.control.update_weights({"path": self.file.path, "table": self.file.table})
        self.control.finish_weight_update(None)
        if not self.control.reset_prefix_cache():
            raise RuntimeError("the server did not reset its prefix cache")
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", type=int, default=6, help="pairs of each policy, beside the first one (6)")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result file")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = save_checkpoint(Path(folder, "checkpoint"), "qwen3")
        for name, checkpoint in (("tiny", tiny), ("157M", _larger(Path(folder, "larger"), tiny))):
            # A process of its own for each, from which servers are forked
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                row = process.submit(beside_trl, checkpoint, Path(folder, name), options.syncs).result()
            found.append({"policy": name} | row)
            print(found[-1], flush=True)
            record.write("trl_weights", options.syncs, {"rows": found}, options.results)


def beside_trl(checkpoint: str, folder: Path, syncs: int) -> dict:
    """Return the times of syncs to an FP8 server and of TRL's to one in BF16, by turns."""
    folder.mkdir()

    def register() -> None:
        WeightTransferEngineFactory.register_engine(BACKEND, "benchmarks.bench_trl_weights", "Loader")

    stock_options = {"words": WORDS, "environment": ENVIRONMENT, "plant": register}
    with (
        forked_server.running(checkpoint, folder / "transfer", kv_cache_dtype="fp8") as server,
        forked_server.running(checkpoint, folder / "trl", forked_server.fork, **stock_options) as stock,
    ):
        trainer = StagedTrainer(server, seed=1)
        sender = Sender(stock, trainer.model)
        pauses, of_trl, answers = [], [], []
        for step in range(syncs + 1):
            perturb(trainer.model, step)
            trainer.sync()
            pauses.append(trainer.engine.pause_seconds)
            of_trl.append(sender.sync())
            body = {"model": checkpoint, "prompt": [[4, 5, 6]], "max_tokens": 1, "logprobs": 1}
            answer = httpx.post(f"{stock.url}/v1/completions", json=body, timeout=60)
            answers.append(answer.json()["choices"][0]["logprobs"]["token_logprobs"][0])
        if len(set(answers)) != len(answers):
            raise RuntimeError(f"TRL's weights did not arrive: {answers}")
        # The first pair is left out: in it the trainer also shows its file to the workers
        ratios = [own / trl for own, trl in zip(pauses[1:], of_trl[1:], strict=True)]
        return {
            "pause_seconds": record.spread(pauses[1:]),
            "trl_pause_seconds": record.spread(of_trl[1:]),
            "pause_over_trl": record.spread(ratios),
            "bytes": sum(tensor.nbytes for tensor in trainer.engine.layout.held.values()),
            "trl_bytes": sender.bytes,
        }


def _larger(folder: Path, tiny: str) -> str:
    """Save a Qwen3 of 30 layers with random weights and the tokenizer of the tiny policy."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=640,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
