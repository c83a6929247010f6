"""Rollouts that a checkpoint falls into the middle of.

TRL 1.16 generates once for `steps_per_generation * num_iterations` micro-steps and keeps the rollouts in memory only. A
checkpoint taken in between forgets them: the resumed run generates again for a prompt batch that is partly used, counts
its micro-steps from zero and skips the prompts that come next. Here the unused rollouts travel with the checkpoint, a
file a rank, with everything that belongs to them (log-probs, weights of the correction, KV scales in force).
"""

from pathlib import Path

import torch
from accelerate.utils import send_to_device


def save_rollouts(folder: str | Path, rank: int, step: int, batches: list[dict]) -> None:
    """Write the micro-step counter and the buffered batches of tensors of this rank."""
    torch.save({"step": step, "batches": batches}, _file(folder, rank))


def load_rollouts(folder: str | Path, rank: int, device: torch.device) -> tuple[int, list[dict]] | None:
    """What `save_rollouts` wrote, on `device`, or None if the checkpoint does not fall into a generation."""
    if not (path := _file(folder, rank)).exists():
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    return state["step"], send_to_device(state["batches"], device)


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rollouts_{rank}.pt"
