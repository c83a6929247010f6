"""Keeps `fp8_run.jsonl` while a run goes: a callback, and a hook for each generation."""

from collections.abc import Callable, Mapping

import torch
from transformers import TrainerCallback

from .numerics.kv_scales import KVScales
from .numerics.rollout_sample import RolloutSample, rollout_sample
from .run_file import append, begin


class RunLog(TrainerCallback):
    """Writes on the main process only; pictures are of that process's completions.

    Args:
        folder: The run's output_dir.
        facts: Called when training begins.
        is_main_process: Whether this process writes.
    """

    def __init__(self, folder: str, facts: Callable[[], Mapping], is_main_process: bool):
        self.folder, self.facts, self.is_main_process = folder, facts, is_main_process

    def on_train_begin(self, args, state, control, **kwargs):
        if self.is_main_process:
            begin(self.folder, state.global_step, self.facts())

    def on_log(self, args, state, control, **kwargs):
        if self.is_main_process and state.log_history:
            append(self.folder, "log", state.log_history[-1])

    def sample(self, batch: Mapping[str, torch.Tensor]) -> RolloutSample | None:
        """Of a generation batch as TRL lays it out, before a correction changes its log-probs; nothing is waited for."""
        if not self.is_main_process or not {"old_per_token_logps", "sampling_per_token_logps"} <= batch.keys():
            return None
        mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
        return rollout_sample(batch["old_per_token_logps"], batch["sampling_per_token_logps"], mask_BT)

    def generation(
        self, step: int, sample: RolloutSample | None, scales: KVScales | None, saturation_L2: torch.Tensor | None
    ) -> None:
        """Write what one generation of rollouts was like; `saturation_L2` is the share of k and v beyond their scale."""
        if not self.is_main_process:
            return
        row = {"step": step} | (sample.read() if sample else {})
        if scales is not None:
            row["kv_scales"] = scales.values.tolist()
        if saturation_L2 is not None:
            row["kv_saturation"] = saturation_L2.tolist()
        append(self.folder, "rollouts", row)
