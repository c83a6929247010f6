"""How long a sync keeps a vLLM server from generating, and how many bytes its workers read.

    python -m benchmarks.bench_server [--syncs 8]

A server is forked and trained against, for a tiny policy and for one of 157 M parameters (random weights).
`pause_seconds` is the time from the call of /pause to the answer of /resume, so it contains the workers' copies, their
checksums and the trainer's comparison; `sync_seconds` is the whole sync, with the quantization. The first sync is left
out: it also shows the file to the workers.
"""

import argparse
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from testing import forked_server, record
from testing.runs import arguments, dataset, reward_digits, rows
from testing.tiny_models import save_checkpoint
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", type=int, default=8, help="of each policy, beside the first one (8)")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result file")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = save_checkpoint(Path(folder, "checkpoint"), "qwen3")
        for name, checkpoint in (("tiny", tiny), ("157M", _larger(Path(folder, "larger"), tiny))):
            # A process of its own for each: a server is forked before its trainer starts process groups
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                row = process.submit(measured, checkpoint, Path(folder, name), options.syncs).result()
            found.append({"policy": name} | row)
            print(found[-1], flush=True)
            record.write("server", options.syncs, {"rows": found}, options.results)


def measured(checkpoint: str, folder: Path, syncs: int) -> dict:
    """Return the times of `syncs` syncs to a server of its own, and what each of them sent."""
    folder.mkdir()
    with forked_server.running(checkpoint, folder / "transfer", kv_cache_dtype="fp8") as server:
        os.environ |= {FOLDER: server.folder, TOKEN: server.token}
        args = arguments(folder / "run", vllm_mode="server", vllm_server_base_url=server.url, max_steps=syncs + 1)
        trainer = FP8GRPOTrainer(server.model, reward_digits, args, dataset())
        generation = trainer.vllm_generation
        trainer.train()
        steps = rows(trainer)[1:]
        staged = generation.engine.layout.held
        result = {
            "pause_seconds": record.spread([row["fp8/pause_seconds"] for row in steps]),
            "sync_seconds": record.spread([row["fp8/sync_seconds"] for row in steps]),
            "tensors": len(staged),
            "bytes": sum(tensor.nbytes for tensor in staged.values()),
            "k3_kl": record.spread([row["mismatch/k3_kl"] for row in steps]),
            "audit_failures": generation.audit_failures,
        }
        return result


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
