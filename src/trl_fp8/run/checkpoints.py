"""Checkpoints that were written to their end, and the rollouts that a checkpoint holds.

TRL 1.16 generates once for `steps_per_generation * num_iterations` micro-steps and keeps the rollouts in memory only.
A run that is resumed inside of them would generate again for a prompt batch that is partly used, and skip the prompts
that come next. So each rank writes its unused rollouts, and all that belongs to them, into the checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME


SAMPLING = ("temperature", "top_p", "top_k", "min_p")
LAST = ("true", "auto")  # words of a command line or a file for the last whole checkpoint


def marker(checkpoint: str | Path) -> Path:
    """Return the file that exists while a checkpoint is written: a process that dies then leaves a folder that looks
    whole.

    It lies beside the folder, so that it is neither uploaded with it nor counted as a checkpoint.
    """
    checkpoint = Path(checkpoint)
    return checkpoint.with_name(f"_{checkpoint.name}.unfinished")


def checkpoints(output_dir: str | Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints in a folder, by step: those that were written to their end, and the others."""
    steps = {path: path.name.rpartition("-")[2] for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    found = sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path]))
    unfinished = [path for path in found if marker(path).exists() or not (path / TRAINER_STATE_NAME).exists()]
    return [path for path in found if path not in unfinished], unfinished


def checkpoint_to_resume(output_dir: str | Path, value: str | bool | None) -> str | None:
    """Return the folder that a value of `resume_from_checkpoint` means; None to start from the beginning.

    True, "true" and "auto" mean the last checkpoint that was written to its end, if there is one: a job can be
    submitted again with the same command. "false" is a command line's word for False.

    Raises:
        ValueError: A folder that is named is no checkpoint, or was not written to its end.
    """
    word = str(value or False).lower()
    if word == "false":
        return None
    whole, _ = checkpoints(output_dir)
    if word in LAST:
        return str(whole[-1]) if whole else None
    instead = f"Use resume_from_checkpoint={str(whole[-1])!r}" if whole else "Leave it out to start from the beginning"
    folder = Path(value)
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
    return str(folder)


def require_ranks(checkpoint: str | Path, processes: int) -> None:
    """Raise `ValueError` if rollouts in the checkpoint are of another number of processes."""
    files = _rollout_files(checkpoint)
    if files and (ranks := _read(files[0])["ranks"]) != processes:
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} falls into a generation of {ranks} processes, whose rollouts "
            f"cannot be divided among {processes}. Launch {ranks} processes, or resume from a checkpoint without "
            "rollouts_*.pt (after which a generation was due)."
        )


def forget_rollouts(folder: str | Path) -> None:
    """Remove rollouts of a run that wrote the same checkpoint before."""
    for file in _rollout_files(folder):
        file.unlink()


def sampling_of(args: Any) -> dict[str, Any]:
    """Return the settings that decide from which distribution of the policy a run samples."""
    settings = {name: getattr(args, name) for name in SAMPLING} | (args.generation_kwargs or {})
    return {name: settings[name] for name in SAMPLING}


def save_rollouts(
    folder: str | Path, accelerator: Accelerator, step: int, batches: list[dict], sampling: dict
) -> None:
    """Write the micro-step counter and the buffered batches of this rank, and how they were sampled."""
    state = {"ranks": accelerator.num_processes, "step": step, "batches": batches, "sampling": sampling}
    torch.save(state, Path(folder) / f"rollouts_{accelerator.process_index}.pt")


def load_rollouts(folder: str | Path, accelerator: Accelerator, sampling: dict) -> tuple[int, list[dict]] | None:
    """Return what `save_rollouts` wrote, on the rank's device; None if a generation was due at the checkpoint."""
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
    if other := {name: value for name, value in state["sampling"].items() if value != sampling[name]}:
        now = ", ".join(f"{name}={sampling[name]!r}" for name in other)
        before = ", ".join(f"{name}={value!r}" for name, value in other.items())
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} falls into a generation that was sampled with {before}, and this "
            f"run has {now}: log-probs of the rollouts left would be of another distribution than the policy's. Set "
            f"{before}, or resume from a checkpoint without rollouts_*.pt (after which a generation was due)."
        )
    return state["step"], send_to_device(state["batches"], accelerator.device)


def _rollout_files(checkpoint: str | Path) -> list[Path]:
    return sorted(Path(checkpoint).glob("rollouts_*.pt"))


def _read(file: Path) -> dict:
    return torch.load(file, map_location="cpu", weights_only=True)
