"""The addition demo in every precision, over seeds: does FP8 learn as well,
at what mismatch, and what does each part do?

    python -m benchmarks.bench_demo [--seeds 5] [--other-seeds 3] [--jobs 1] [--reuse]
    python -m benchmarks.bench_demo --lora [--seeds 5]

Runs examples/grpo_addition.py once per seed and precision, each in its own process, and records held-out accuracy
before and after, the reward of each step, mismatch, calibration and sync. The three precisions that are compared for
learning run `--seeds` seeds, the others `--other-seeds`; ratios are of runs with the same seed. Wall times of two
precisions say nothing about GPUs: on CPU both FP8 kernels are references.

--lora trains adapters instead, merged at each sync and on a base that policy and engine share. The two runs of a seed
follow each other, the file is written after each, and the same command goes on where it ended.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from testing import record
from testing.processes import alone

from . import harness
from .pictures import plot_rewards


ROOT = Path(__file__).parents[1]
BF16_WEIGHTS = ["--fp8_weights", "false"]
NOT_SIMULATED = ["--simulate_kv_cache", "false"]
LEARNING = {
    "bf16": [*BF16_WEIGHTS, "--kv_cache_dtype", "auto", "--use_vllm", "true"],
    "fp8_linears_kv": [],
    "fp8_flow": ["--fp8_forward", "one_forward"],
}
OTHERS = {
    "fp8_linears_kv_simulated": ["--simulate_kv_cache", "true"],
    "kv_only": [*BF16_WEIGHTS, *NOT_SIMULATED],
    "kv_only_simulated": [*BF16_WEIGHTS, "--simulate_kv_cache", "true"],
    "policy_calibration": ["--kv_calibration", "policy"],
    "fp8_linears": ["--kv_cache_dtype", "auto"],
}
KEYS = ("reward_start", "reward_end", "mismatch_mean", "training_seconds", "step_seconds_median")
FP8_KEYS = ("sync_seconds_median", "sync_bytes_median", "calibration_seconds_median", "kv_saturation_max")
LORA = {"merged": ["--fp8_base", "false"], "shared": ["--fp8_base", "true"]}
OF_A_RUN = (*KEYS, *FP8_KEYS, "audit_failures", "rewards")
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
    return run_demo(folder, ["--seed", seed, *(LEARNING | OTHERS)[name], *correction])


def run_demo(folder: Path, words: list, settings: str = "grpo_addition") -> dict:
    """Summary of one run of the demo into `folder`, in a process of its own, with further arguments."""
    script, config = (ROOT / "examples" / name for name in ("grpo_addition.py", f"{settings}.yaml"))
    command = [sys.executable, *map(str, [script, "--config", config, "--output_dir", folder, *words])]
    place = alone()
    done = subprocess.run(command, capture_output=True, text=True, env=place)
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
    parser.add_argument("--lora", action="store_true", help="Compare the two ways to train adapters, and only them.")
    given = parser.parse_args()
    if given.lora:
        return compare_lora(given.seeds)
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
        label: harness.ratios(*both)
        for label, pair in PAIRS.items()
        if all(both := paired(runs, *pair, "mismatch_mean"))
    }
    if all(both := paired(runs, "fp8_flow", "fp8_linears_kv", "step_seconds_median")):
        results["step_seconds_flow_over_plain"] = harness.ratios(*both)
    compared = [name for name in LEARNING if name in names]
    curves = {name: [row["rewards"] for job, row in runs.items() if job[0] == name] for name in compared}
    results["rewards"] = curves
    isa = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available() or isa == "AVX2":
        plot_rewards(curves, ROOT / "outputs" / "bench_demo" / "rewards.png")
        name = "demo"
    else:  # pretraining ends at another policy there, which the demo compares with its like
        name = f"demo_{isa.lower()}"
    print(record.write(name, given.seeds, results).read_text())


def compare_lora(seeds: int) -> None:
    rows = (record.held("demo_lora", seeds) or {"rows": []})["rows"]
    runs = {(row["base"], row["seed"]): row for row in rows}
    for seed, base in product(range(seeds), LORA):
        if (base, seed) in runs:
            continue
        words = ["--seed", seed, *LORA[base]]
        summary = run_demo(folder_of(f"lora_{base}", seed), words, "grpo_addition_lora")
        runs[base, seed] = {"base": base, "seed": seed} | {key: summary[key] for key in OF_A_RUN}
        print(f"{base}, seed {seed}: {summary['reward_start']:.3f} -> {summary['reward_end']:.3f}", flush=True)
        record.write("demo_lora", seeds, lora_results(runs))


def lora_results(runs: dict) -> dict:
    """What runs, by base and seed, come to; differences and ratios as soon as there are two pairs."""
    results = {}
    for base in LORA:
        if rows := [row for (of, _), row in runs.items() if of == base]:
            results[base] = summarize(rows)
    shared, merged = paired(runs, "shared", "merged", "reward_end")
    if len(shared) > 1:
        differences = [ours - theirs for ours, theirs in zip(shared, merged, strict=True)]
        results["reward_end_shared_minus_merged"] = record.interval(differences)
        for key in ("mismatch_mean", "sync_seconds_median", "sync_bytes_median", "step_seconds_median"):
            results[f"{key}_shared_over_merged"] = harness.ratios(*paired(runs, "shared", "merged", key))
    return results | {"rows": list(runs.values())}


def paired(runs: dict, over: str, under: str, key: str) -> tuple[list[float], list[float]]:
    """`key` of runs of both kinds, those of the seeds that both have."""
    seeds = [seed for name, seed in runs if name == over and (under, seed) in runs]
    return [runs[over, seed][key] for seed in seeds], [runs[under, seed][key] for seed in seeds]


if __name__ == "__main__":
    main()
