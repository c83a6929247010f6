"""`RunLog`, which writes `fp8_run.jsonl` during a run. It records only the rollouts of the main process."""

from collections.abc import Callable
from math import ceil

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from trl_fp8.run.batch import Batch, LogRatio
from trl_fp8.run.facts import run_facts
from trl_fp8.run.feature import Feature

from .log_file import FILE, append, begin, settle


logger = get_logger(__name__)
# Bins of the histogram of log r (`LogRatio`) from -LIMIT to LIMIT. Two more bins count the values below and above
BINS = 120
LIMIT = 3.0
POSITIONS = 1024  # evenly spaced positions of the batch, at which log-probs are read
PAIRS = 256  # pairs of log-probs that are written, at most


class RunLog(Feature, TrainerCallback):
    """Writes on the main process: the facts when training begins, each log, and a line for each generation."""

    keeps_log = True

    def __init__(self, trainer):
        super().__init__(trainer)
        self.writes = trainer.accelerator.is_main_process

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.writes:
            self._write(begin, state.global_step, run_facts(self.trainer))

    def on_log(self, args, state, control, **kwargs) -> None:
        if self.writes and state.log_history:
            self._write(append, "log", state.log_history[-1])

    def extend_batch(self, batch: Batch) -> None:
        if not (self.writes and self.trainer.model.training):
            return
        row = {"step": self.trainer.state.global_step}
        if batch.ratio is not None:
            row |= rollout_sample(batch.ratio)
        self._write(append, "rollouts", row | batch.record)

    def save(self, folder: str) -> None:
        """Give this run's file its final name, if it has another one (log_file.py).

        A file gets this name when a step is done. A checkpoint shows that a step is done, even if none was logged.
        """
        if self.writes:
            self._write(settle)

    def _write(self, write: Callable, *args) -> None:
        """Call `write(folder, *args)` of log_file.py. After an error, as of a full disk, warn and write no more."""
        folder = self.trainer.args.output_dir
        try:
            write(folder, *args)
        except OSError as error:
            self.writes = False
            logger.warning(f"{folder}/{FILE} cannot be written, so this run writes no more lines to it: {error}")


def rollout_sample(ratio: LogRatio) -> dict[str, list | float]:
    """Return a histogram of log r and pairs of log-probs (trainer, rollout) of this rank's batch.

    Synchronizes with the device once.
    """
    scored = ratio.scored_BT.flatten().double()
    # Values below -LIMIT go to bin 0, values from LIMIT on to bin BINS + 1
    bins = ((ratio.values_BT.flatten() + LIMIT) * (BINS / (2 * LIMIT))).floor().long() + 1
    counts = scored.new_zeros(BINS + 2).scatter_add_(0, bins.clamp(0, BINS + 1), scored)
    chosen = evenly_spaced(scored.numel(), POSITIONS, scored.device)
    trainer = ratio.trainer_BT.flatten()[chosen].double()
    rollout = ratio.rollout_BT.flatten()[chosen].double()
    # Copied to the host as one vector, which is faster than four copies
    on_device = [counts, trainer, rollout, scored[chosen]]
    counts, trainer, rollout, is_scored = torch.cat(on_device).cpu().split([len(vector) for vector in on_device])
    pairs = torch.stack([trainer, rollout], 1)[is_scored > 0].tolist()
    stride = max(1, ceil(len(pairs) / PAIRS))
    return {
        "log_ratio_limit": LIMIT,
        "log_ratio_counts": counts.long().tolist(),
        "log_probs": [
            [round(trainer_logp, 5), round(rollout_logp, 5)] for trainer_logp, rollout_logp in pairs[::stride]
        ],
    }


def evenly_spaced(tokens: int, count: int, device: torch.device) -> torch.Tensor:
    """Return at most `count` positions from the first to the last of `tokens`, int64, on `device`."""
    # FP64, because FP32 rounds the last position of more than 2^24 tokens up to one that does not exist
    options = {"dtype": torch.float64, "device": device}
    return torch.linspace(0, max(tokens - 1, 0), min(count, tokens), **options).long()
