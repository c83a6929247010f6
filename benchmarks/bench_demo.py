"""The addition demo in every precision, over seeds: does FP8 learn as well,
at what mismatch, and what does each part do?

    python -m benchmarks.bench_demo [--seeds 5] [--other-seeds 3] [--jobs 1] [--reuse]

Runs examples/grpo_addition.py once per seed and precision, each in its own process, and records held-out accuracy
before and after, the reward of each step, mismatch, calibration and sync. The three precisions that are compared for
learning run `--seeds` seeds, the others `--other-seeds`; ratios are of runs with the same seed. Wall times of two
precisions say nothing about GPUs: on CPU both FP8 kernels are references.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from . import record
from .pictures import plot_rewards


ROOT = Path(__file__).parents[1]
BF16_WEIGHTS = ["--fp8_weights", "false"]
NOT_SIMULATED = ["--simulate_kv_cache", "false"]
LEARNING = {
    "bf16": [*BF16_WEIGHTS, "--kv_cache_dtype", "auto", "--use_vllm", "true"],
    "fp8_linears_kv": [],
    "fp8_flow": ["--fp8_forward", "full"],
}
OTHERS = {
    "fp8_linears_kv_simulated": ["--simulate_kv_cache", "true"],
    "kv_only": [*BF16_WEIGHTS, *NOT_SIMULATED],
    "kv_only_simulated": [*BF16_WEIGHTS, "--simulate_kv_cache", "true"],
    "policy_calibration": ["--kv_calibration", "policy"],
    "fp8_linears": ["--kv_cache_dtype", "auto"],
}
KEYS = ("reward_start", "reward_end", "mismatch_mean", "training_seconds", "step_seconds_median")
FP8_KEYS = ("sync_seconds_median", "calibration_seconds_median", "kv_saturation_max")
PAIRS = {  # ratio of two precisions' mismatch, run by run with the same seed
    "simulation, FP8 weights": ("fp8_linears_kv_simulated", "fp8_linears_kv"),
    "simulation, BF16 weights": ("kv_only_simulated", "kv_only"),
    "flow over plain FP8 rollouts": ("fp8_flow", "fp8_linears_kv"),
    "flow over BF16 rollouts": ("fp8_flow", "bf16"),
}


def folder_of(name: str, seed: int) -> Path:
    return ROOT / "outputs" / "bench_demo" / f"{name}-{seed}"


def run(name: str, seed: int, reuse: bool = False) -> dict:
    folder = folder_of(name, seed)
    if reuse and (folder / "summary.json").exists():
        return json.loads((folder / "summary.json").read_text())
    correction = ["--vllm_importance_sampling_mode", "token_truncate", "--vllm_importance_sampling_clip_max", "2.0"]
    words = ["--seed", seed, *(LEARNING | OTHERS)[name], *correction]
    return run_demo(folder, words, port=29600 + 10 * list(LEARNING | OTHERS).index(name) + seed)


def run_demo(folder: Path, words: list, port: int = 29600) -> dict:
    """Summary of one run of the demo into `folder`, in a process of its own, with further arguments."""
    script, settings = ROOT / "examples" / "grpo_addition.py", ROOT / "examples" / "grpo_addition.yaml"
    command = [sys.executable, *map(str, [script, "--config", settings, "--output_dir", folder, *words])]
    ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ports)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads((folder / "summary.json").read_text())


def summarize(rows: list[dict]) -> dict:
    result = {key: record.spread([row[key] for row in rows]) for key in KEYS}
    result |= {key: record.spread([row[key] for row in rows]) for key in FP8_KEYS if rows[0][key] is not None}
    if rows[0]["calibration_seconds_median"] is not None:
        shares = [row["calibration_seconds_median"] / row["step_seconds_median"] for row in rows]
        result["calibration_share_of_step"] = record.spread(shares)
    result["seeds"] = len(rows)
    result["reward_end_per_seed"] = [row["reward_end"] for row in rows]
    result["audit_failures"] = sum(row["audit_failures"] for row in rows)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--other-seeds", type=int, default=3, help="Of the precisions not compared for learning.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time; timings want 1.")
    parser.add_argument("--reuse", action="store_true", help="Take runs that outputs/bench_demo has already.")
    parser.add_argument("--finished", action="store_true", help="Take only those, and run nothing.")
    given = parser.parse_args()
    seeds = dict.fromkeys(LEARNING, given.seeds) | dict.fromkeys(OTHERS, given.other_seeds)
    jobs = [(name, seed) for name in seeds for seed in range(seeds[name])]
    if given.finished:
        jobs = [job for job in jobs if (folder_of(*job) / "summary.json").exists()]
    with ThreadPoolExecutor(given.jobs) as pool:
        reuse = given.reuse or given.finished
        runs = dict(zip(jobs, pool.map(lambda job: run(*job, reuse=reuse), jobs), strict=True))
    names = list(dict.fromkeys(name for name, _ in jobs))
    results = {name: summarize([row for job, row in runs.items() if job[0] == name]) for name in names}
    results["mismatch_ratios"] = {
        label: record.spread(ratios)
        for label, pair in PAIRS.items()
        if (ratios := paired(runs, *pair, "mismatch_mean"))
    }
    slower = paired(runs, "fp8_flow", "fp8_linears_kv", "step_seconds_median")
    results["step_seconds_flow_over_plain"] = record.spread(slower)
    curves = {name: [row["rewards"] for job, row in runs.items() if job[0] == name] for name in LEARNING}
    results["rewards"] = curves
    isa = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available() or isa == "AVX2":
        plot_rewards(curves, ROOT / "docs" / "images" / "learning_parity.png")
        name = "demo"
    else:  # pretraining ends at another policy there, which the demo compares with its like
        name = f"demo_{isa.lower()}"
    print(record.write(name, given.seeds, results).read_text())


def paired(runs: dict, over: str, under: str, key: str) -> list[float]:
    """Ratios of `key`, run by run with the same seed."""
    return [
        row[key] / runs[under, seed][key]
        for (name, seed), row in runs.items()
        if name == over and (under, seed) in runs
    ]


if __name__ == "__main__":
    main()
