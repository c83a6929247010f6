"""Training runs that are killed (SIGKILL) in their third step or in the save before it, and a killed export.

    python -m tests.faults.dying CHECKPOINT FOLDER

FOLDER/<place> is the output folder of the run that died at that place, FOLDER/export/fp8 that of the export. Each is a
fork of this process, which imports what they need once.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import trl_fp8.export.export  # noqa: E402
from testing.runs import arguments, training  # noqa: E402
from trl_fp8 import FP8GRPOTrainer  # noqa: E402


PLACES = ("before_the_save", "at_its_last_file", "in_the_sync")
FLAGS = dict(max_steps=3, save_strategy="steps", save_steps=1)


def main(checkpoint: str, folder: Path) -> None:
    for place in (*PLACES, "export"):
        if os.fork() == 0:
            if place == "export":
                export(checkpoint, folder / place)
            else:
                train(checkpoint, folder / place, place)
            os._exit(0)  # nobody died
        _, status = os.wait()
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"{place} ended with {status}")


def train(checkpoint: str, folder: Path, place: str) -> None:
    with training(checkpoint, arguments(folder, **FLAGS)) as trainer:
        doom(trainer, place)
        trainer.train()


def export(checkpoint: str, folder: Path) -> None:
    module, written = trl_fp8.export.export, []
    save_file = module.save_file

    def dying(*args, **kwargs):
        save_file(*args, **kwargs)
        written.append(1)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    module.save_file = dying
    folder.mkdir()
    policy = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    module.export_fp8(*policy, folder / "fp8", shard_bytes=60_000)


def doom(trainer: FP8GRPOTrainer, place: str) -> None:
    """Let the process die at `place` once two optimizer steps are made."""

    def die_now() -> None:
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed(function: Callable) -> Callable:
        def dying(*args, **kwargs):
            die_now()
            return function(*args, **kwargs)

        return dying

    if place == "before_the_save":
        trainer.save_model = killed(trainer.save_model)
    elif place == "at_its_last_file":
        trainer._save_rng_state = killed(trainer._save_rng_state)
    else:
        parameters = trainer.vllm_generation._iter_named_params

        def some_parameters():
            for number, named in enumerate(parameters()):
                if number == 10:
                    die_now()
                yield named

        trainer.vllm_generation._iter_named_params = some_parameters


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
