"""One run at a time in a folder: others are refused by name, until its process ends or its training does."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from accelerate import Accelerator

from testing.fake_rollout_engine import FakeEngineTrainer
from testing.processes import fork
from testing.runs import arguments, dataset, reward_digits
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.run import folder_lock
from trl_fp8.run.folder_lock import FILE, lock_folder, unlock_folder


TRY = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@pytest.fixture
def other(tmp_path):
    """Another process that has locked the folder `tmp_path / "run"`, and has a child."""

    def lock() -> None:
        lock_folder(tmp_path / "run", Accelerator(cpu=True))
        if os.fork():
            (tmp_path / "is_locked").touch()
        time.sleep(600)

    process = fork(lock, tmp_path / "other.log")
    end = time.monotonic() + 60
    while not (tmp_path / "is_locked").exists():
        assert time.monotonic() < end, (tmp_path / "other.log").read_text()
        time.sleep(0.01)
    yield process
    os.killpg(process, signal.SIGKILL)


def locked_out(folder):
    """Another process cannot lock the folder."""
    ran = subprocess.run([sys.executable, "-c", TRY, str(folder / FILE)], capture_output=True, text=True)
    assert ran.returncode == 0 or "BlockingIOError" in ran.stderr
    return ran.returncode != 0


@pytest.fixture(autouse=True)
def unlocked(tmp_path):
    yield
    unlock_folder(tmp_path / "run")


def test_a_second_run_is_refused_before_its_engine_starts_and_goes_on_once_the_first_was_killed(
    other, checkpoint, tmp_path, monkeypatch
):
    started = []
    monkeypatch.setattr(FakeEngineTrainer, "_start_engine", lambda *_, **__: started.append(1))
    task = (checkpoint("qwen3"), reward_digits, arguments(tmp_path / "run", kv_cache_dtype="auto"), dataset())
    named = rf"another run writes there \(process {other} on .*, started 20\d\d-.*set another output_dir"
    with pytest.raises(ValueError, match=named):
        FakeEngineTrainer(*task)
    lock_folder(tmp_path / "elsewhere", Accelerator(cpu=True))
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    monkeypatch.undo()
    assert started == []
    FakeEngineTrainer(*task)


def test_trainers_of_one_process_share_the_folder_as_a_notebooks_do(checkpoint, tmp_path):
    task = (checkpoint("qwen3"), reward_digits, arguments(tmp_path / "run", kv_cache_dtype="auto"), dataset())
    first, second = FakeEngineTrainer(*task), FakeEngineTrainer(*task)
    assert locked_out(tmp_path / "run")  # both are there, none has trained
    first.train()
    assert not locked_out(tmp_path / "run")
    second.train()
    seen = []
    first._inner_training_loop = lambda *_, **__: seen.append(locked_out(tmp_path / "run"))
    first.train()
    assert seen == [True] and not locked_out(tmp_path / "run")


def test_with_everything_fp8_off_nothing_is_locked(other, checkpoint, tmp_path):
    flags = {"fp8_weights": False, "kv_cache_dtype": "auto", "use_vllm": False, "max_steps": 1}
    trainer = FP8GRPOTrainer(checkpoint("qwen3"), reward_digits, arguments(tmp_path / "run", **flags), dataset())
    trainer.train()
    assert trainer.state.global_step == 1


def test_an_error_of_the_main_process_is_broadcast_to_ranks_that_wait_for_its_answer(tmp_path, monkeypatch):
    (tmp_path / "run").touch()  # a file, so that no folder can be made
    broadcast = []
    monkeypatch.setattr(folder_lock, "broadcast_object_list", lambda objects: broadcast.extend(objects) or objects)
    with pytest.raises(FileExistsError):
        lock_folder(tmp_path / "run", Accelerator(cpu=True))
    assert [type(sent) for sent in broadcast] == [type(None), FileExistsError]
    monkeypatch.setattr(folder_lock, "broadcast_object_list", lambda objects: broadcast)
    with pytest.raises(FileExistsError):  # as on a rank that received it
        lock_folder(tmp_path / "elsewhere", Accelerator(cpu=True))


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "lockf", refused)
    lock_folder(tmp_path / "run", Accelerator(cpu=True))
    assert re.search("run cannot be locked .No locks available.: start no second run in it", caplog.text)
    assert fcntl is folder_lock.fcntl and (tmp_path / "run" / FILE).exists()
