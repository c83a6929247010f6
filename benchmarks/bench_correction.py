"""What correction and its metrics cost: their share of a training step of the addition demo, measured inside one run.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_correction [--steps 20]

The first three steps warm up. For each preset the share is (time in `log_ratio` and `apply_correction`) /
(step time), step by step.
"""

import argparse
import time

import torch
from transformers import TrainerCallback

from examples.addition_task import cached_checkpoint, exact_answer, reinforcement_dataset
from testing import record
from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.features.correction import correction
from trl_fp8.features.correction.presets import PRESETS
from trl_fp8.run import batch


WARM_UP = 3
NAMES = ("fp8_token_tis", "fp8_geometric_token_tis", "slime_mis")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20, help="measured steps per preset")
    steps = parser.parse_args().steps
    spent, began, shares = [], [0.0], {name: [] for name in NAMES}

    class Meter(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.feature(correction.Correction).correction = PRESETS[
                NAMES[max(0, state.global_step - WARM_UP) // steps]
            ].correction
            spent.clear()
            began[0] = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            step = state.global_step - 1 - WARM_UP
            if step >= 0:
                shares[NAMES[step // steps]].append((sum(spent), time.perf_counter() - began[0]))

    def timed(function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - start)

        return call

    for module, name in ((batch, "log_ratio"), (correction, "apply_correction")):
        setattr(module, name, timed(getattr(module, name)))
    args = FP8GRPOConfig(
        "outputs/bench_correction",
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=32,
        vllm_max_model_length=64,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        max_steps=WARM_UP + steps * len(NAMES),
        rollout_correction="monitor",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = FP8GRPOTrainer(
        str(cached_checkpoint()), exact_answer, args, reinforcement_dataset(), callbacks=[Meter()]
    )
    trainer.train()
    results = {
        name: {
            "share_of_step": record.spread([correction / step for correction, step in pairs]),
            "correction_milliseconds": record.spread([1000 * correction for correction, _ in pairs]),
            "step_seconds": record.spread([step for _, step in pairs]),
        }
        for name, pairs in shares.items()
    }
    print(record.write("correction_cost", steps, results).read_text())


if __name__ == "__main__":
    main()
