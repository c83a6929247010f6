"""Checkpoints that were written to their end, and the rollouts that a checkpoint holds.

TRL 1.16 generates once for `steps_per_generation * num_iterations` micro-steps and keeps the rollouts in memory only.
A checkpoint may be saved when only some of these rollouts were used. A run resumed from it would generate again for
the same prompts, and skip the next ones. So each rank writes its unused rollouts, and everything that belongs to them,
into the checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME


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
    # transformers puts a number behind the prefix. So a user's copy called checkpoint-backup-500 does not count
    steps = {path: path.name.removeprefix(prefix) for path in Path(output_dir).glob(f"{prefix}*")}
    folders = sorted((path for path in steps if steps[path].isdigit()), key=lambda path: int(steps[path]))
    whole = [path for path in folders if (path / TRAINER_STATE_NAME).exists() and not marker(path).exists()]
    return whole, [path for path in folders if path not in whole]


def checkpoint_to_resume(output_dir: str | Path, value: str | bool | None) -> str | None:
    """Return the folder for a value of `resume_from_checkpoint`; None to start from the beginning.

    True, "true" and "auto" mean the last checkpoint that was written to its end, if there is one: a job can be
    submitted again with the same command. "false" is a command line's word for False.

    Raises:
        ValueError: `value` names a folder that is no checkpoint, or was not written to its end.
    """
    word = str(value or False).lower()
    if word == "false":
        return None
    whole, _ = checkpoints(output_dir)
    if word in RESUME_LAST:
        return str(whole[-1]) if whole else None
    instead = f"Use resume_from_checkpoint={str(whole[-1])!r}" if whole else "Leave it out to start from the beginning"
    folder = Path(value).absolute()  # the marker is named after the folder, and "." is no name
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


def require_ranks(checkpoint: str | Path, processes: int) -> None:
    """Raise `ValueError` if another number of processes saved rollouts in the checkpoint."""
    files = _rollout_files(checkpoint)
    ranks = _read(files[0])["ranks"] if files else processes
    if ranks != processes:
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} falls into a generation of {ranks} processes, whose rollouts "
            f"cannot be divided among {processes}. Launch {ranks} processes, or resume from a checkpoint without "
            "rollouts_*.pt (saved when all rollouts of a generation were used)."
        )


def forget_rollouts(folder: str | Path) -> None:
    """Remove the rollouts that an earlier run left in a checkpoint folder of the same name."""
    for file in _rollout_files(folder):
        file.unlink()


def sampling_of(args: Any) -> dict[str, Any]:
    """Return the values of the settings in `SAMPLING`."""
    settings = {name: getattr(args, name) for name in SAMPLING} | (args.generation_kwargs or {})
    return {name: settings[name] for name in SAMPLING}


def save_rollouts(
    folder: str | Path, accelerator: Accelerator, step: int, batches: list[dict], sampling: dict
) -> None:
    """Write the micro-step counter `step`, the buffered batches of this rank, and how they were sampled."""
    state = {"ranks": accelerator.num_processes, "step": step, "batches": batches, "sampling": sampling}
    torch.save(state, Path(folder) / f"rollouts_{accelerator.process_index}.pt")


def load_rollouts(folder: str | Path, accelerator: Accelerator, sampling: dict) -> tuple[int, list[dict]] | None:
    """Return step and batches of `save_rollouts`, on the rank's device; None if none were saved.

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
