"""Rollouts that a checkpoint falls into the middle of.

TRL 1.16 generates once for `steps_per_generation * num_iterations` micro-steps and keeps the rollouts in memory
only. A checkpoint taken in between forgets them: the resumed run generates again for a prompt batch that is partly
used, counts its micro-steps from zero and skips the prompts that come next. Here the unused rollouts travel with
the checkpoint, a file a rank, with everything that belongs to them (log-probs, weights of the correction, KV
scales in force).
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device


def save_rollouts(folder: str | Path, accelerator: Accelerator, step: int, batches: list[dict]) -> None:
    """Write the micro-step counter and the buffered batches of tensors of this rank."""
    state = {"ranks": accelerator.num_processes, "step": step, "batches": batches}
    torch.save(state, Path(folder) / f"rollouts_{accelerator.process_index}.pt")


def load_rollouts(folder: str | Path, accelerator: Accelerator) -> tuple[int, list[dict]] | None:
    """What `save_rollouts` wrote, on the rank's device, or None if the checkpoint does not fall into a generation.

    Raises:
        ValueError: It does, with another number of ranks.
    """
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
