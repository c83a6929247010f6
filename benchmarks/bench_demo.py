"""The addition demo with BF16 and with FP8 rollouts, over seeds: does FP8 learn as well, and at what mismatch?

    python benchmarks/bench_demo.py [--seeds 3]

Runs examples/grpo_addition.py once per seed and precision, each in its own process, and records held-out accuracy before
and after, mismatch and sync time. Wall times of the two precisions say nothing about GPUs: on CPU both FP8 kernels are
references.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import record


ROOT = Path(__file__).parents[1]
PRECISIONS = {
    "bf16": ["--fp8_weights", "false", "--kv_cache_dtype", "auto", "--use_vllm", "true"],
    "fp8_linears": ["--fp8_weights", "true", "--kv_cache_dtype", "auto"],
    "fp8_linears_kv": ["--fp8_weights", "true", "--kv_cache_dtype", "fp8"],
}
KEYS = ("reward_start", "reward_end", "mismatch_mean", "training_seconds")


def run(name: str, seed: int) -> dict:
    folder = ROOT / "outputs" / "bench_demo" / f"{name}-{seed}"
    script, settings = ROOT / "examples" / "grpo_addition.py", ROOT / "examples" / "configs" / "addition.yaml"
    correction = ["--vllm_importance_sampling_mode", "token_truncate", "--vllm_importance_sampling_clip_max", "2.0"]
    words = ["--config", settings, "--seed", seed, "--output_dir", folder, *PRECISIONS[name], *correction]
    subprocess.run([sys.executable, script, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    results = {}
    for name in PRECISIONS:
        summaries = [run(name, seed) for seed in range(seeds)]
        results[name] = {key: record.spread([summary[key] for summary in summaries]) for key in KEYS}
        results[name]["reward_end_per_seed"] = [summary["reward_end"] for summary in summaries]
        results[name]["audit_failures"] = sum(summary["audit_failures"] for summary in summaries)
        if summaries[0]["sync_seconds_median"] is not None:
            results[name]["sync_seconds"] = record.spread([summary["sync_seconds_median"] for summary in summaries])
    print(record.write("demo", seeds, results).read_text())


if __name__ == "__main__":
    main()
