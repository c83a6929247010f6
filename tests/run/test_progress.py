"""Progress in a line: a bar on a terminal, a few lines elsewhere, on one rank, from wherever a run begins."""

import io
import logging
import re

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState

from testing.runs import arguments, training
from trl_fp8 import FP8ProgressCallback
from trl_fp8.run import lines, progress


BF16 = dict(fp8_weights=False, kv_cache_dtype="auto", use_vllm=False)
LOGS = {
    "reward": 0.5234,
    "completions/mean_length": 17.6,
    "sampling/sampling_logp_difference/mean": 0.01234,
    "loss": 0.1,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def go(callback, first=0, last=40, steps=range(40), logs=LOGS, main=True):
    """The events of a run from step `first`, with a log at each of `steps`."""
    state = TrainerState(max_steps=last, global_step=first, is_world_process_zero=main)
    around = None, state, TrainerControl()
    callback.on_train_begin(*around)
    for step in range(first + 1, last + 1):
        state.global_step = step
        callback.on_step_end(*around)
        if step - 1 in steps:
            callback.on_log(*around, logs=dict(logs))
    callback.on_train_end(*around)


def test_without_a_terminal_a_tenth_of_the_run_is_a_line(capsys):
    go(FP8ProgressCallback())
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "step 1/40  reward 0.52  length 18  mismatch 0.0123"
    assert [int(line.split()[1].partition("/")[0]) for line in out.splitlines()] == [*range(1, 38, 4), 40]
    assert err == ""


def test_long_runs_have_a_line_a_minute(capsys, monkeypatch):
    now = iter(range(0, 10**9, 25))
    monkeypatch.setattr("trl_fp8.run.progress.time.monotonic", lambda: next(now))
    go(FP8ProgressCallback(), last=100_000, steps=range(30))
    assert 5 < len(capsys.readouterr().out.splitlines()) < 15


def test_on_a_terminal_it_is_a_bar(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    go(FP8ProgressCallback())
    assert capsys.readouterr().out == ""
    drawn = re.split(r"[\r\n]+", terminal.getvalue())
    assert drawn[-2].startswith("step 40/40 |") and drawn[-2].endswith("reward 0.52  length 18  mismatch 0.0123")
    assert "{" not in terminal.getvalue()  # no dictionary of metrics


def test_a_resumed_run_goes_on_where_it_was(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    go(FP8ProgressCallback(), first=30)
    drawn = re.findall(r"step (\d+)/40", terminal.getvalue())
    assert drawn[0] == "30" and drawn[-1] == "40"


def test_other_ranks_say_nothing(capsys):
    go(FP8ProgressCallback(), main=False)
    assert capsys.readouterr() == ("", "")


def test_an_evaluation_is_a_line_and_one_before_training_is_none(capsys):
    callback, state = FP8ProgressCallback(), TrainerState(max_steps=40, is_world_process_zero=True)
    evaluated = {f"eval_{key}": value for key, value in LOGS.items()}
    callback.on_log(None, state, None, logs=evaluated)
    assert capsys.readouterr().out == ""
    go(callback, steps=[19], logs=evaluated)
    assert capsys.readouterr().out == "step 20/40  evaluation: reward 0.52  length 18  mismatch 0.0123\n"


@pytest.mark.parametrize("missing", [{"reward": None}, {"completions/mean_length": None}])
def test_unmeasured_values_are_left_out(missing, capsys):
    go(FP8ProgressCallback(), last=1, logs=LOGS | missing)
    out = capsys.readouterr().out
    assert out == ("" if "reward" in missing else "step 1/1  reward 0.52  mismatch 0.0123\n")


def test_a_warning_is_a_line_of_its_own_and_only_where_the_user_has_not_configured_logging(capsys, monkeypatch):
    logger = logging.getLogger("trl_fp8.features.correction.correction")
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # pytest's
    shown = lines.Warnings()
    shown.begin()
    logger.warning("[RANK 0] too far apart")
    shown.end()
    assert capsys.readouterr().err == "warning: too far apart\n"
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
    shown.begin()
    assert logging.getLogger("trl_fp8").handlers == []


def test_only_a_step_that_is_slow_is_named(capsys, monkeypatch):
    monkeypatch.setattr(lines, "PATIENCE", 0.05)
    with lines.slow_step("quick"):
        pass
    with lines.slow_step("slow"):
        lines.Event().wait(0.2)
    with lines.slow_step("of another rank", shown=False):
        lines.Event().wait(0.1)
    assert capsys.readouterr().out == "slow\n"


class OfCaller(ProgressCallback):
    pass


@pytest.mark.parametrize(
    "given, silent, expected",
    [
        (None, False, [FP8ProgressCallback]),
        (None, True, []),
        ([FP8ProgressCallback], False, [FP8ProgressCallback]),
        ([OfCaller()], False, [OfCaller, ProgressCallback]),
    ],
)
def test_progress_is_a_line_unless_the_user_chose(given, silent, expected, checkpoint, tmp_path):
    args = arguments(tmp_path, **BF16, disable_tqdm=silent)
    with training(checkpoint("qwen3"), args, callbacks=given) as trainer:
        found = [type(one) for one in trainer.callback_handler.callbacks]
    assert [one for one in found if issubclass(one, ProgressCallback)] == expected
    assert (PrinterCallback in found) == silent


@pytest.mark.parametrize("seen", [True, False])
def test_an_evaluation_draws_a_bar_on_a_terminal_alone(seen, monkeypatch):
    monkeypatch.setattr(progress, "on_terminal", lambda: seen)
    callback, state = FP8ProgressCallback(), TrainerState(is_world_process_zero=True)
    callback.on_prediction_step(None, state, None, eval_dataloader=[1, 2])
    assert (callback.prediction_bar is not None) == seen
    if seen:
        callback.prediction_bar.close()
