"""Keeps `fp8_run.jsonl` while a run goes: a callback, and a hook for each generation."""

from collections.abc import Callable, Mapping

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from trl_fp8.correction.log_ratio import LogRatio
from trl_fp8.correction.sample import RolloutSample, rollout_sample
from trl_fp8.quantization.kv_scales import KVScales

from .file import FILE, append, begin


logger = get_logger(__name__)


class RunLog(TrainerCallback):
    """Pictures are of the completions of the process that writes.

    Args:
        folder: The run's output_dir.
        facts: Called when training begins.
        writes: Whether this process writes: the main process does, if anything is to be written.
    """

    def __init__(self, folder: str, facts: Callable[[], Mapping], writes: bool):
        self.folder, self.facts, self.writes = folder, facts, writes

    def on_train_begin(self, args, state, control, **kwargs):
        if self.writes:
            self._write(begin, state.global_step, self.facts())

    def on_log(self, args, state, control, **kwargs):
        if self.writes and state.log_history:
            self._write(append, "log", state.log_history[-1])

    def sample(self, ratio: LogRatio | None) -> RolloutSample | None:
        """Of one generation's log-ratios, where TRL has them; nothing is waited for."""
        return rollout_sample(ratio) if self.writes and ratio is not None else None

    def generation(
        self, step: int, sample: RolloutSample | None, scales: KVScales | None, saturation_L2: torch.Tensor | None
    ) -> None:
        """Write what one generation of rollouts was like; `saturation_L2` is the share of k and v beyond
        their scale.
        """
        if not self.writes:
            return
        row = {"step": step} | (sample.read() if sample else {})
        if scales is not None:
            row["kv_scales"] = scales.values.tolist()
        if saturation_L2 is not None:
            row["kv_saturation"] = saturation_L2.tolist()
        self._write(append, "rollouts", row)

    def _write(self, write: Callable, *line) -> None:
        """A full disk ends the log, with a warning, and not the run."""
        try:
            write(self.folder, *line)
        except OSError as error:
            self.writes = False
            logger.warning(f"{self.folder}/{FILE} cannot be written, and there will be no more of it: {error}")
