"""What the age of rollouts costs in learning, with BF16 and FP8 rollouts, and what a correction wins back.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_staleness [--seeds 4] [--staleness 0 1 2 4 8] [--steps 40]

The addition task, `FP8AsyncGRPOTrainer` and a vLLM server of its own for each cell. Trainer and server run in
lock-step: step j trains on rollouts of version max(1, j - staleness), so that staleness is set and not raced.
Corrections:

    none        ratio of the policy to itself at the start of the step; rollouts count as the policy's own
    combined    TRL's loss: one ratio of policy to rollouts, clipped at 1 +- epsilon
    decoupled   none, times min(pi / mu, 2) for each token

A cell ends after `--steps` or `--seconds`, and its row is written at once. The same command goes on with the cells
that have no row of this commit. With other flags it begins anew, and replaces the file: rows would not be comparable.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from examples.addition_task import (
    MAX_COMPLETION_TOKENS,
    cached_checkpoint,
    exact_answer,
    held_out_accuracy,
    policy_sampler,
    reinforcement_dataset,
)
from testing import forked_server, record
from testing.async_rollouts import LockStep, LockStepWorker, without_flash_attention
from testing.runs import rows
from trl_fp8 import FP8AsyncGRPOConfig, FP8AsyncGRPOTrainer
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN


GROUPS, GENERATIONS, LAST = 8, 8, 10
PRECISIONS = {
    "bf16": {"fp8_weights": False, "kv_cache_dtype": "auto"},
    "fp8": {"fp8_weights": True, "kv_cache_dtype": "fp8"},
}
CORRECTIONS = {
    "none": {"rollout_correction": {"level": None}},
    "combined": {"vllm_importance_sampling_correction": False},
    "decoupled": {"rollout_correction": "fp8_token_tis"},
}
METRICS = (
    "mismatch/k1_kl",
    "staleness/k1_beyond_mismatch",
    "correction/effective_sample_size",
    "clip_ratio/region_mean",
)


class LockStepTrainer(LockStep, FP8AsyncGRPOTrainer):
    pass


class Deadline(TrainerCallback):
    """Ends a training that takes too long."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def on_step_end(self, args, state, control, **kwargs):
        if time.monotonic() > self._end:
            control.should_training_stop = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seconds", type=float, default=150, help="of training in a cell, after which it ends (150)")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result file")
    options = parser.parse_args()
    checkpoint = str(cached_checkpoint())
    earlier = record.held("staleness", options.seeds, options.results)
    found = earlier["rows"] if earlier else []
    cells = product(range(options.seeds), options.staleness, options.precisions, options.corrections)
    for seed, staleness, precision, correction in cells:
        cell = {"seed": seed, "staleness": staleness, "precision": precision, "correction": correction}
        if any(row.items() >= cell.items() for row in found):
            continue
        # A process of its own for each: a server is forked before its trainer starts process groups
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            row = process.submit(
                measured, checkpoint, **cell, steps=options.steps, rate=options.learning_rate, seconds=options.seconds
            ).result()
        found.append(cell | row)
        print(found[-1], flush=True)
        record.write("staleness", options.seeds, {"rows": found}, options.results)


def measured(
    checkpoint: str,
    *,
    seed: int,
    staleness: int,
    precision: str,
    correction: str,
    steps: int,
    rate: float,
    seconds: float,
) -> dict:
    """Train one cell against a server of its own. Return its rewards, held-out accuracy, means of metrics, seconds."""
    torch.set_num_threads(1)
    task, tokenizer = reinforcement_dataset(), AutoTokenizer.from_pretrained(checkpoint)
    prompt_ids = tokenizer(task["prompt"][:], add_special_tokens=False)["input_ids"]
    answers = task["answer"][:]

    def reward(completions: list[str], row: int) -> list[float]:
        return exact_answer(completions, [answers[row]] * len(completions))

    with (
        tempfile.TemporaryDirectory() as folder,
        forked_server.running(
            checkpoint, Path(folder, "transfer"), max_num_seqs=GROUPS * GENERATIONS, **PRECISIONS[precision]
        ) as server,
        without_flash_attention(),
    ):
        os.environ |= {FOLDER: server.folder, TOKEN: server.token}
        worker = LockStepWorker(
            server.url,
            prompt_ids,
            reward,
            staleness=staleness,
            groups=GROUPS,
            generations=GENERATIONS,
            max_tokens=MAX_COMPLETION_TOKENS,
            seed=seed,
        )
        args = FP8AsyncGRPOConfig(
            str(Path(folder, "run")),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            token_budget=-1,
            per_device_train_batch_size=GROUPS * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=MAX_COMPLETION_TOKENS,
            max_steps=steps,
            learning_rate=rate,
            max_staleness=max(1, staleness),
            vllm_server_base_url=server.url,
            fp8_run_log=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            **PRECISIONS[precision],
            **CORRECTIONS[correction],
        )
        data = task.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
        trainer = LockStepTrainer(
            checkpoint,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            rollout_worker=worker,
            callbacks=[Deadline(seconds)],
        )
        start = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - start
        trainer.save_model(str(Path(folder, "policy")))
        policy = AutoModelForCausalLM.from_pretrained(Path(folder, "policy"))
        logged = rows(trainer)
        rewards = [row["reward"] for row in logged]
        row = {
            "steps": len(logged),
            "seconds": round(seconds, 1),
            "reward_first": fmean(rewards[:LAST]),
            "reward_last": fmean(rewards[-LAST:]),
            "held_out": held_out_accuracy(policy_sampler(policy, tokenizer)),
            "audit_failures": trainer.vllm_generation.audit_failures,
            "rewards": [round(reward, 4) for reward in rewards],
        }
        for name in METRICS:
            values = [each[name] for each in logged if each.get(name) is not None]
            if values:
                row[name] = fmean(values)
        return row


if __name__ == "__main__":
    main()
