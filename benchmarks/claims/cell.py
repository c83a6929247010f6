"""One training run of the grid, in a process of its own: `run` adds it to the table of runs."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from transformers import TrainerCallback

from testing import record
from testing.processes import free_port
from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.quantization.codec.kv_scales import KVScales

from . import run_table
from .formats import SIMULATED, SimulatedFormat, rounded_weights
from .grid import Cell
from .precision import EMULATED, ComputesIn
from .tasks import TASKS


OF_THE_GRID = ("simulated", "kv_scales")  # among a cell's flags, which FP8GRPOConfig does not know
# Of each generation, as the trainer logs them
CURVES = {
    "reward": "reward",
    "k3": "mismatch/k3_kl",
    "token_mult_prob_error": "mismatch/token_mult_prob_error",
    "logp_difference_max": "mismatch/logp_difference_max",
    "late_over_early": "mismatch/late_over_early",
    "effective_sample_size": "correction/effective_sample_size",
    "fraction_masked": "correction/fraction_masked_tokens",
    "fraction_clipped": "correction/fraction_clipped_high",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "length": "completions/mean_length",
}


class Trainer(FP8GRPOTrainer):
    """The package's, whose forward computes in `emulated`, if that is a type."""

    emulated: torch.dtype | None = None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        with ComputesIn(self.emulated) if self.emulated else nullcontext():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class HeldOut(TrainerCallback):
    """Held-out accuracy, by the number of generations behind it; 0 if it is not finite.

    The forward is the policy's own, under the trainer's autocast, also of runs with the engine's.
    """

    def __init__(self, cell: Cell, trainer: Trainer):
        self.cell, self.trainer, self.accuracies = cell, trainer, {}
        self.task = TASKS[cell.task]

    def note(self, generations: int) -> None:
        accuracy = self.task.evaluate(self.trainer.model, self.trainer.processing_class)
        self.accuracies[generations] = accuracy if isfinite(accuracy) else 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.note(0)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        generations, rest = divmod(state.global_step, self.cell.updates)
        if not rest and generations % (self.cell.generations // self.cell.evaluations) == 0:
            self.note(generations)


def run_logged(cell: Cell, log: Path) -> None:
    """`run` in a process of its own, which prints to `log`."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    # The command in the table: not the one of the process that this one was forked from
    sys.orig_argv = [sys.executable, "-m", __package__, cell.name]
    run(cell)


def run(cell: Cell) -> None:
    """Train, and add the run to the table."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # vLLM would compile its sampler for 20 seconds
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with TemporaryDirectory() as scratch:
        results = train(cell, scratch)
    run_table.add(record.made(1, results), run_table.path())


def settings(cell: Cell, scratch: str) -> FP8GRPOConfig:
    task = TASKS[cell.task]
    return FP8GRPOConfig(
        output_dir=scratch,
        seed=cell.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=cell.precision not in EMULATED,  # TRL's default: autocast
        max_steps=cell.generations * cell.updates,
        num_iterations=cell.updates,
        per_device_train_batch_size=cell.completions,
        num_generations=8,
        max_completion_length=task.max_completion_length,
        vllm_max_model_length=task.max_model_length,
        learning_rate=cell.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        fp8_run_log=False,
        rollout_correction=cell.correction_in_force,
        **{name: value for name, value in cell.flags.items() if name not in OF_THE_GRID},
    )


def train(cell: Cell, scratch: str) -> dict:
    task = TASKS[cell.task]
    trainer = Trainer(str(task.checkpoint()), task.reward, settings(cell, scratch), task.dataset())
    trainer.emulated = EMULATED.get(cell.precision)
    held_out = HeldOut(cell, trainer)
    trainer.add_callback(held_out)
    generation = trainer.vllm_generation
    if "simulated" in cell.flags:
        form = SIMULATED[cell.flags["simulated"]]
        generation.sync_weights = rounding(trainer, form, generation.sync_weights)
    if "kv_scales" in cell.flags:
        scales = generation.delivery.carried
        scales.calibrate = uncalibrated(cell.flags["kv_scales"], scales.calibrate)
    began = perf_counter()
    with ended(held_out) as end:
        trainer.train()
    return {
        "cell": asdict(cell),
        "end": end,
        "held_out": {str(generations): round(value, 5) for generations, value in held_out.accuracies.items()},
        "autocast": trainer.accelerator.mixed_precision,
        "curves": curves(trainer.state.log_history),
        "seconds": perf_counter() - began,
    }


def rounding(trainer: Trainer, form: SimulatedFormat, sync):
    """`sync`, while the policy's weights are rounded."""

    def rounded_sync() -> None:
        with rounded_weights(trainer.model, form):
            sync()

    return rounded_sync


def uncalibrated(scale: float, calibrate):
    """`calibrate`, which runs as ever, with `scale` for all scales that it found."""
    return lambda: KVScales(torch.full_like(calibrate().values, scale))


@contextmanager
def ended(held_out: HeldOut) -> Iterator[dict]:
    """How the training inside the block ended. A policy that is not finite has an accuracy of 0 from then on."""
    end = {"diverged": None}
    try:
        yield end
    except (ValueError, RuntimeError, FloatingPointError) as error:
        finite = all(parameter.isfinite().all() for parameter in held_out.trainer.model.parameters())
        if finite:
            raise
        end["diverged"] = str(error)[:300]
    cell = held_out.cell
    every = cell.generations // cell.evaluations
    for generations in range(every, cell.generations + 1, every):
        held_out.accuracies.setdefault(generations, 0.0)


def curves(history: list[dict]) -> dict[str, list[float | None]]:
    """What was logged of each generation, with its first update, to four digits; None where there is no such number,
    as of a quotient of mismatches that are 0.
    """
    rows = [row for row in history if "reward" in row]
    return {name: [_short(row.get(key)) for row in rows] for name, key in CURVES.items()}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
