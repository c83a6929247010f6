"""Writes `fp8_run.jsonl` while a run goes. A line about a generation is of the main process's batch."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from accelerate.logging import get_logger

from trl_fp8.run.batch import Batch
from trl_fp8.run.facts import run_facts
from trl_fp8.run.feature import Feature

from .log_file import FILE, append, begin, settle
from .rollout_sample import rollout_sample


if TYPE_CHECKING:
    from trl_fp8.rollouts import FP8Rollouts


logger = get_logger(__name__)


class RunLog(Feature):
    """The main process writes: facts when training begins, each log, and a line for each generation."""

    keeps_log = True

    def __init__(self, trainer: "FP8Rollouts"):
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
        """Settle the file: the step of a checkpoint is done, whether its log was due or not."""
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
