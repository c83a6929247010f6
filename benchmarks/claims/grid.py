"""The grid of training runs in grid.yaml."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        rollouts, flags: How the engine computes, by name, and as flags of `FP8GRPOConfig`.
        correction, correction_in_force: Of the mismatch, by name, and as `rollout_correction` takes it.
        precision: Of the trainer: "bf16", which is TRL's autocast, or one of precision.py.
        rate: Multiple of the task's learning rate, which `learning_rate` is.
        updates: Of each batch of rollouts.
        completions: Per generation.
        generations, evaluations: In the whole run; evaluations are evenly spaced, the last one at the end.
    """

    task: str
    rollouts: str
    correction: str
    precision: str
    rate: int
    updates: int
    seed: int
    flags: dict
    correction_in_force: dict | str
    learning_rate: float
    completions: int
    generations: int
    evaluations: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def arm(self) -> str:
        """What cells that differ by their seed have in common."""
        return "-".join([self.task, self.rollouts, self.correction, self.precision, self.pressure])

    @property
    def pressure(self) -> str:
        return f"{self.rate}x{self.updates}"


def cells(grid: dict | None = None) -> list[Cell]:
    """All of the grid, each once, in its order: within a block all arms of a seed before the next seed."""
    grid = grid or yaml.safe_load(Path(__file__).with_name("grid.yaml").read_text())
    made = {}
    for block in ({"pressure": (1, 1)} | each for each in grid["blocks"]):
        name, seeds, arms, (rate, updates) = (block.pop(key) for key in ("task", "seeds", "arms", "pressure"))
        runs = grid["tasks"][name] | block
        learning_rate = runs.pop("learning_rate") * rate
        for seed, arm in product(range(seeds), arms):
            rollouts, correction, precision = [*arm.split(), "bf16"][:3]
            cell = Cell(
                task=name,
                rollouts=rollouts,
                correction=correction,
                precision=precision,
                rate=rate,
                updates=updates,
                seed=seed,
                flags=grid["rollouts"][rollouts],
                correction_in_force=grid["corrections"][correction],
                learning_rate=learning_rate,
                **runs,
            )
            made.setdefault(cell.name, cell)
    return list(made.values())
