"""Finds the checkpoints that were written to their end, and saves and loads the unused rollouts in a checkpoint.

TRL 1.16 generates once for `steps_per_generation * num_iterations` micro-steps and keeps the rollouts in memory only.
A checkpoint may be saved when only some of these rollouts were used. A run resumed there would generate again for
the same prompts, and skip the next prompts. So each rank writes its unused rollouts, and everything that belongs to
them, into the checkpoint.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME
from trl.trainer.utils import RepeatSampler


SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # settings that decide from which distribution a run samples
RESUME_LAST = ("true", "auto")  # values of resume_from_checkpoint for the last complete checkpoint


def marker(checkpoint: str | Path) -> Path:
    """Return the marker of a checkpoint: a file that exists while the checkpoint is written.

    A process that dies while it writes leaves a folder that looks complete, but also the marker. The marker lies
    beside the folder, so that it is not uploaded with the checkpoint.
    """
    checkpoint = Path(checkpoint)
    return checkpoint.with_name(f"_{checkpoint.name}.unfinished")


def checkpoints(output_dir: str | Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints in a folder, by step: those that were written to their end, and the others."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    steps = {}  # folder -> step
    for path in Path(output_dir).glob(f"{prefix}*"):
        step = path.name.removeprefix(prefix)
        if step.isdigit():  # False for a user's copy called checkpoint-backup-500
            steps[path] = int(step)
    folders = sorted(steps, key=steps.get)
    whole = [path for path in folders if (path / TRAINER_STATE_NAME).exists() and not marker(path).exists()]
    unfinished = [path for path in folders if path not in whole]
    return whole, unfinished


def checkpoint_to_resume(output_dir: str | Path, value: str | bool | None) -> str | None:
    """Return the folder for a value of `resume_from_checkpoint`; None to start from the beginning.

    True, "true" and "auto" mean the last checkpoint that was written to its end, if there is one, so a job can
    be submitted again with the same command. "false" is a command line's word for False.

    Raises:
        ValueError: `value` names a folder that is no checkpoint, or was not written to its end.
    """
    word = str(value).lower()
    if not value or word == "false":
        return None
    whole, _ = checkpoints(output_dir)
    if word in RESUME_LAST:
        return str(whole[-1]) if whole else None
    instead = f"Use resume_from_checkpoint={str(whole[-1])!r}" if whole else "Leave it out to start from the beginning"
    folder = Path(value).absolute()  # absolute, because `marker` needs the folder's name, and "." has none
    reason = None
    if marker(folder).exists():
        reason = "was not written to its end: the run was killed while it was saved"
    elif not folder.is_dir():
        reason = f"there is no such folder, seen from {Path.cwd()}"
    elif not (folder / TRAINER_STATE_NAME).exists():
        reason = f"the folder is no checkpoint of a run, for it has no {TRAINER_STATE_NAME}"
        if (folder / CONFIG_NAME).exists():
            instead += ", or give the folder as the model to train it further"
    if reason:
        raise ValueError(f"resume_from_checkpoint={str(value)!r}: {reason}. {instead}.")
    return str(value)


def require_same_checkpoint(checkpoint: str | None, output_dir: str | Path) -> None:
    """Raise `ValueError` on every rank if the ranks resume from different checkpoints. Collective."""
    names = gather_object([Path(checkpoint).name if checkpoint else "none"])
    if len(set(names)) > 1:
        found = ", ".join(f"{name} ({count} of {len(names)} ranks)" for name, count in Counter(names).items())
        raise ValueError(
            f"output_dir={str(output_dir)!r} does not have the same checkpoints on all machines of the run: {found}. "
            "Set output_dir to a folder that all machines share, or copy the checkpoint to each of them."
        )


def require_ranks(checkpoint: str | Path, processes: int) -> None:
    """Raise `ValueError` if another number of processes saved rollouts in the checkpoint."""
    files = _rollout_files(checkpoint)
    if not files:
        return
    ranks = _read(files[0])["ranks"]
    if ranks != processes:
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} falls into a generation of {ranks} processes, whose rollouts "
            f"cannot be divided among {processes}. Launch {ranks} processes, or resume from a checkpoint without "
            "rollouts_*.pt (saved when all rollouts of a generation were used)."
        )


def require_slices(checkpoint: str | Path, slices: int, steps_per_generation: int) -> None:
    """Raise `ValueError` if the rollouts in the checkpoint are not divided into `steps_per_generation` slices."""
    if slices != steps_per_generation:
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} falls into a generation with steps_per_generation={slices}, "
            f"and this run has steps_per_generation={steps_per_generation}: it would train twice on some of the "
            f"remaining rollouts, or look for some that do not exist. Set steps_per_generation={slices}, or resume "
            "from a checkpoint without rollouts_*.pt (saved when all rollouts of a generation were used)."
        )


def has_training_state(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint has more than weights. With `save_only_model` transformers writes no state of the
    optimizer, of the learning rate or of random numbers, and resumes without a warning.
    """
    return any(Path(checkpoint).glob("rng_state*"))


def skip_orders(sampler: Any, checkpoint: str | Path) -> None:
    """Skip the orders of the epochs that were completed before a checkpoint, so that `sampler` begins with the next.

    TRL's sampler draws an order for each epoch from one generator, which begins anew in a resumed run. Does nothing
    to other samplers, and without shuffling.
    """
    if not isinstance(sampler, RepeatSampler) or not sampler.shuffle:
        return
    epochs = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))).epoch or 0
    for _ in range(int(epochs)):
        torch.randperm(sampler.num_samples, generator=sampler.generator)


def forget_rollouts(folder: str | Path) -> None:
    """Remove the rollouts that an earlier run left in a checkpoint folder of the same name."""
    for file in _rollout_files(folder):
        file.unlink()


def sampling_of(args: Any) -> dict[str, Any]:
    """Return the values of the settings in `SAMPLING`. `generation_kwargs` override flags."""
    settings = {name: getattr(args, name) for name in SAMPLING} | (args.generation_kwargs or {})
    return {name: settings[name] for name in SAMPLING}


def save_rollouts(
    folder: str | Path, accelerator: Accelerator, step: int, batches: list[dict], sampling: dict
) -> None:
    """Write the micro-step counter `step`, the buffered batches of this rank, and how they were sampled."""
    state = {"ranks": accelerator.num_processes, "step": step, "batches": batches, "sampling": sampling}
    torch.save(state, Path(folder) / f"rollouts_{accelerator.process_index}.pt")


def load_rollouts(folder: str | Path, accelerator: Accelerator, sampling: dict) -> tuple[int, list[dict]] | None:
    """Return the step and the batches that `save_rollouts` wrote, on the rank's device; None if it wrote none.

    Raises:
        ValueError: The number of processes or `sampling` has changed, or the file of this rank is missing.
    """
    require_ranks(folder, accelerator.num_processes)
    if not _rollout_files(folder):
        return None
    own = Path(folder) / f"rollouts_{accelerator.process_index}.pt"
    if not own.exists():
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} lacks {own.name}, the rollouts of process "
            f"{accelerator.process_index}. Copy the whole checkpoint, or resume from one without rollouts_*.pt."
        )
    state = _read(own)
    changed = [name for name, value in state["sampling"].items() if value != sampling[name]]
    if changed:
        now = ", ".join(f"{name}={sampling[name]!r}" for name in changed)
        before = ", ".join(f"{name}={state['sampling'][name]!r}" for name in changed)
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} falls into a generation that was sampled with {before}, and this "
            f"run has {now}: log-probs of the remaining rollouts would be of another distribution than the policy's. "
            f"Set {before}, or resume from a checkpoint without rollouts_*.pt (saved when all rollouts of a "
            "generation were used)."
        )
    return state["step"], send_to_device(state["batches"], accelerator.device)


def _rollout_files(checkpoint: str | Path) -> list[Path]:
    return sorted(Path(checkpoint).glob("rollouts_*.pt"))


def _read(file: Path) -> dict:
    return torch.load(file, map_location="cpu", weights_only=True)
