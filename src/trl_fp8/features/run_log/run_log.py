"""Writes `fp8_run.jsonl` while a run goes. Lines about a generation are of the main process's part alone."""

from collections.abc import Callable

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from trl_fp8.run.batch import Batch, LogRatio
from trl_fp8.run.facts import run_facts
from trl_fp8.run.feature import Feature

from .log_file import FILE, append, begin, settle


logger = get_logger(__name__)
BINS, LIMIT = 120, 3.0  # of log r in [-LIMIT, LIMIT], and an open bin on either side
POSITIONS, PAIRS = 1024, 256  # looked at, evenly over the batch; kept at most


class RunLog(Feature, TrainerCallback):
    """The main process writes: facts when training begins, each log, and a line for each generation."""

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
        """Make this run's file the current one: a checkpoint shows that its step is done, also without a log."""
        if self.writes:
            self._write(settle)

    def _write(self, write: Callable, *line) -> None:
        """Call `write`. If it fails, for example on a full disk, warn and write no more; the run goes on."""
        folder = self.trainer.args.output_dir
        try:
            write(folder, *line)
        except OSError as error:
            self.writes = False
            logger.warning(f"{folder}/{FILE} cannot be written, and there will be no more of it: {error}")


def rollout_sample(ratio: LogRatio) -> dict[str, list | float]:
    """Return the histogram and the pairs (trainer, rollout) of one rank's batch. Waits for the device once."""
    scored = ratio.scored_BT.flatten().double()
    bins = ((ratio.values_BT.flatten() + LIMIT) * (BINS / (2 * LIMIT))).floor().long() + 1
    counts = scored.new_zeros(BINS + 2).scatter_add_(0, bins.clamp(0, BINS + 1), scored)
    chosen = torch.linspace(0, max(scored.numel() - 1, 0), min(POSITIONS, scored.numel()), device=scored.device).long()
    sides = [side.flatten()[chosen].double() for side in (ratio.trainer_BT, ratio.rollout_BT)]
    # one vector, so that all of it travels to the host in one copy
    counts, tokens = torch.cat([counts, *sides, scored[chosen]]).cpu().tensor_split([BINS + 2])
    columns = tokens.view(3, len(chosen)).T.tolist()
    pairs = [[round(trainer, 5), round(rollout, 5)] for trainer, rollout, is_scored in columns if is_scored]
    return {
        "log_ratio_limit": LIMIT,
        "log_ratio_counts": counts.long().tolist(),
        "log_probs": pairs[:: -(-len(pairs) // PAIRS) or 1],  # every n-th, n rounded up
    }
