"""A thousand steps of the addition demo: does memory grow, do KV scales stay, does every sync arrive?

    python -m benchmarks.bench_soak [--steps 1000]

The demo's policy, rewards and flags, in one process. Resident memory is read after every step;
its slope is fitted over the steps after a warm-up of 100, in MiB per 100 steps.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import linear_regression, median

from transformers import TrainerCallback

from testing import record
from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


WARM_UP = 100
MIB = 2**20


class Memory(TrainerCallback):
    """Resident memory of the process (Linux), in bytes, after each step."""

    def __init__(self):
        self.resident: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident.append(4096 * pages)


def slope(resident: list[int]) -> float:
    """MiB per 100 steps after the warm-up."""
    values = resident[WARM_UP:]
    return 100 * linear_regression(range(len(values)), values).slope / MIB


def main() -> None:
    from examples.addition_task import cached_checkpoint, exact_answer, reinforcement_dataset

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--completions", type=int, default=32, help="of a step; the demo has 128")
    options = parser.parse_args()
    memory = Memory()
    with tempfile.TemporaryDirectory() as folder:
        args = FP8GRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            max_steps=options.steps,
            per_device_train_batch_size=options.completions,
            num_generations=8,
            max_completion_length=32,
            vllm_max_model_length=64,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            temperature=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = FP8GRPOTrainer(
            str(cached_checkpoint()), exact_answer, args, reinforcement_dataset(), callbacks=[memory]
        )
        trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    scales = [(row["fp8/kv_scale_min"], row["fp8/kv_scale_max"]) for row in rows]
    rewards = [row["reward"] for row in rows]
    results = {
        "steps": len(rows),
        "completions": options.completions,
        "memory_mib": {"after_warm_up": memory.resident[WARM_UP] / MIB, "end": memory.resident[-1] / MIB},
        "memory_slope_mib_per_100_steps": slope(memory.resident),
        "audit_failures": trainer.vllm_generation.audit_failures,
        "kv_scales": {"smallest": min(low for low, _ in scales), "largest": max(high for _, high in scales)},
        "kv_scale_changes": sum(before != after for before, after in zip(scales, scales[1:], strict=False)),
        "kv_saturation": record.spread([row.get("fp8/kv_saturation_fraction", 0.0) for row in rows]),
        "reward": {"first_100": median(rewards[:100]), "last_100": median(rewards[-100:])},
        "mismatch": record.spread([row["mismatch/logp_difference_mean"] for row in rows]),
    }
    print(f"written: {record.write('soak', 1, results)}")


if __name__ == "__main__":
    main()
