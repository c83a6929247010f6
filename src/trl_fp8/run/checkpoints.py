"""Checkpoints that were written to their end, told from those whose writing was cut short.

A checkpoint is a folder of several files, written one after another; a process that dies in between leaves a folder
that looks like a checkpoint and lacks, for example, what the KV cache calibration needs to continue. While one is
written, a marker lies beside it.

TRL 1.16 generates once for `steps_per_generation * num_iterations` micro-steps and keeps the rollouts in memory only.
A run that is resumed inside of them would generate again for a prompt batch that is partly used, count its micro-steps
from zero and skip the prompts that come next. So the unused rollouts travel with the checkpoint, a file a rank, with
everything that belongs to them (log-probs, weights of the correction, KV scales in force).
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


logger = get_logger(__name__)


def marker(checkpoint: str | Path) -> Path:
    """Beside the folder, so that it is neither uploaded with it nor counted as a checkpoint."""
    checkpoint = Path(checkpoint)
    return checkpoint.with_name(f"_{checkpoint.name}.unfinished")


def checkpoint_to_resume(output_dir: str | Path, asked: str | bool | None) -> str | bool | None:
    """What `resume_from_checkpoint=asked` means: True becomes the last checkpoint that was written to its end."""
    if not asked:
        return asked
    found = sorted(Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=_step)
    whole = [checkpoint for checkpoint in found if not marker(checkpoint).exists()]
    instead = f"resume_from_checkpoint={str(whole[-1])!r}" if whole else "start anew: there is no whole one"
    if asked is not True:
        if marker(asked).exists():
            raise ValueError(
                f"resume_from_checkpoint={str(asked)!r} was not written to its end: the run was killed while it was "
                f"saved. Use {instead}."
            )
        return asked
    if skipped := [checkpoint.name for checkpoint in found if checkpoint not in whole]:
        logger.warning(f"{', '.join(skipped)} in {output_dir} were not written to their end and are passed over.")
    return str(whole[-1]) if whole else True  # transformers says that there is none


def save_rollouts(folder: str | Path, accelerator: Accelerator, step: int, batches: list[dict]) -> None:
    """Write the micro-step counter and the buffered batches of tensors of this rank."""
    state = {"ranks": accelerator.num_processes, "step": step, "batches": batches}
    torch.save(state, Path(folder) / f"rollouts_{accelerator.process_index}.pt")


def load_rollouts(folder: str | Path, accelerator: Accelerator) -> tuple[int, list[dict]] | None:
    """What `save_rollouts` wrote, on the rank's device; None if the checkpoint does not fall into a generation."""
    files = sorted(Path(folder).glob("rollouts_*.pt"))
    if not files:
        return None
    own = Path(folder) / f"rollouts_{accelerator.process_index}.pt"
    state = torch.load(own if own in files else files[0], map_location="cpu", weights_only=True)
    if state["ranks"] != accelerator.num_processes:
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} falls into a generation of {state['ranks']} processes, whose "
            f"rollouts cannot be divided among {accelerator.num_processes}. Launch {state['ranks']} processes, or "
            "resume from a checkpoint without rollouts_*.pt (after which a generation was due)."
        )
    return state["step"], send_to_device(state["batches"], accelerator.device)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
