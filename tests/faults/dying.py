"""Training runs that are killed (SIGKILL) in their third step or in the save before it, and a killed export."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_fp8.export.export
from testing.processes import fork
from testing.runs import arguments, training
from trl_fp8 import FP8GRPOTrainer


PLACES = ("before_the_save", "at_its_last_file", "in_the_sync")
FLAGS = dict(max_steps=3, save_strategy="steps", save_steps=1)


def die(checkpoint: str, folder: Path) -> None:
    """Write what a run that died at each place has left to `folder / place`, and what the export has to
    `folder / "export"`. Each dies in a fork of this process.
    """
    runs = {place: partial(train, checkpoint, folder / place, place) for place in PLACES}
    for place, run in (runs | {"export": partial(export, checkpoint, folder / "export")}).items():
        log = folder / f"{place}.log"
        _, status = os.waitpid(fork(run, log), 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{place}: {log.read_text()[-4000:]}"


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
