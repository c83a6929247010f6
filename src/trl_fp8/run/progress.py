"""`FP8ProgressCallback`: one line on training, in place of a dictionary of 70 metrics at each log.

    step 12/40 |███████▌                | 00:13<00:28, reward 0.52  length 18  mismatch 0.0189

On a terminal the line is a bar. In the log of a job there is a line for the first step, for the last one, for each
tenth of the run, and once a minute. A line shows logged metrics, so it waits for the next log (`logging_steps`).
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack

from tqdm.auto import tqdm
from transformers import ProgressCallback

from .lines import Warnings, on_terminal, say, slow_step


SHOWN = {  # label -> (metric, format of its value)
    "reward": ("reward", ".2f"),
    "length": ("completions/mean_length", ".0f"),
    "mismatch": ("sampling/sampling_logp_difference/mean", ".4f"),
}
# Without a terminal:
LINES = 10  # a run prints at least this many lines, if it logs often enough
SECONDS = 60.0  # if the latest line is older than this, the next log prints a line


class FP8ProgressCallback(ProgressCallback):
    """Progress with the latest reward, completion length and mismatch, and a line for each evaluation in a training.

    `FP8Rollouts` adds it in place of transformers' `ProgressCallback`, unless `disable_tqdm` is set or one of
    `callbacks` is a progress bar. `report_to`, the run's log and `trainer.state.log_history` get all metrics.
    """

    def __init__(self):
        super().__init__()
        self._warnings = Warnings()
        self._first_step = ExitStack()  # contains the `slow_step` of the first step, then nothing
        # Without a terminal the next line is due at this step, or at this monotonic time, whichever comes first
        self._due_step = 0
        self._due_time = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.current_step = state.global_step  # not 0 in a resumed run
        if not state.is_world_process_zero:
            return
        self._due_step = self.current_step
        self._due_time = 0.0
        self.training_bar = tqdm(
            total=state.max_steps,
            initial=self.current_step,
            bar_format="step {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",
            dynamic_ncols=True,
            delay=0,
            disable=not on_terminal(),
        )
        self._warnings.begin()
        text = "The first step takes longer: its kernels are compiled, once for all steps."
        self._first_step.enter_context(slow_step(text))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._first_step.close()  # does nothing after the first step
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self.training_bar is None:  # this rank is not the first, or an evaluation runs outside of a training
            return
        step = state.global_step
        last = state.max_steps
        evaluated = latest(logs, "eval_")
        if evaluated:
            say(f"step {step}/{last}  evaluation: {evaluated}")
        text = latest(logs)
        if not text:
            return
        self.training_bar.set_postfix_str(text)
        is_due = step >= self._due_step or step >= last or time.monotonic() >= self._due_time
        if self.training_bar.disable and is_due:
            self._due_step = step + max(1, last // LINES)
            self._due_time = time.monotonic() + SECONDS
            say(f"step {step}/{last}  {text}")

    def on_prediction_step(self, args, state, control, **kwargs) -> None:
        if on_terminal():
            super().on_prediction_step(args, state, control, **kwargs)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._first_step.close()
        super().on_train_end(args, state, control, **kwargs)
        self._warnings.end()


def latest(logs: Mapping[str, float] | None, prefix: str = "") -> str:
    """Return the metrics of `SHOWN` as a line, looked up in `logs` as prefix + name; empty without a reward."""
    logs = logs or {}
    if logs.get(prefix + "reward") is None:
        return ""
    shown = []
    for label, (name, number_format) in SHOWN.items():
        value = logs.get(prefix + name)
        if value is not None:
            shown.append(f"{label} {value:{number_format}}")
    return "  ".join(shown)
