"""Tensors in a file that a trainer writes and a server's workers read."""

import os
import signal
from pathlib import Path

import pytest
import torch

from trl_fp8.engine.vllm_server import staging
from trl_fp8.engine.vllm_server.staging import StagingFile, opened, remove_abandoned


TENSORS = {
    "scale": ("float32", []),
    "norm": ("bfloat16", [7]),
    "nothing": ("bfloat16", [0, 4]),
    "codes": ("float8_e4m3fn", [3, 5]),
}


@pytest.fixture
def staged(tmp_path):
    file = StagingFile(str(tmp_path), TENSORS)
    file.tensors["codes"].copy_(torch.arange(15.0).view(3, 5))
    file.tensors["scale"].fill_(0.5)
    file.tensors["norm"].copy_(torch.arange(7))
    yield file
    file.remove()


def test_a_reader_sees_what_was_written_last(staged):
    read = opened(staged.path, staged.table)
    assert list(read) == ["codes", "norm", "nothing", "scale"]  # by the size of an element
    for name, tensor in staged.tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name].float(), tensor.float())
    staged.tensors["scale"].fill_(0.25)
    assert read["scale"] == 0.25


def test_a_removed_file_stays_readable_for_those_who_opened_it(staged):
    read = opened(staged.path, staged.table)
    staged.remove()
    assert read["scale"] == 0.5
    with pytest.raises(ValueError, match="cannot be opened"):
        opened(staged.path, staged.table)


def test_only_the_user_may_read_the_file(staged):
    assert os.stat(staged.path).st_mode & 0o777 == 0o600


def test_a_truncated_file_is_an_error_and_no_signal(staged):
    read = opened(staged.path, staged.table)
    os.truncate(staged.path, 4)
    with pytest.raises(ValueError, match="truncated"):
        read["norm"]
    with pytest.raises(ValueError, match="beyond them"):
        opened(staged.path, staged.table)


@pytest.mark.parametrize("place", [["float32", [1 << 40], 0], ["float32", [1], -64], ["float32", [-1], 0]], ids=str)
def test_a_table_that_exceeds_the_file_is_refused(staged, place):
    with pytest.raises(ValueError, match="its table puts x"):
        opened(staged.path, {"x": place})


def test_an_unknown_dtype_is_refused(staged):
    with pytest.raises(ValueError, match="unknown dtype 'nn'"):
        opened(staged.path, {"x": ["nn", [1], 0]})


def test_what_is_no_regular_file_of_the_user_is_refused(staged, tmp_path, monkeypatch):
    os.symlink(staged.path, tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")  # opening one waits for a writer
    for path in (tmp_path / "link", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="cannot be opened|not a regular file"):
            opened(str(path), staged.table)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(ValueError, match="not a regular file of this server's user"):
        opened(staged.path, staged.table)


def test_a_file_that_somebody_put_in_the_place_of_a_new_one_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "urandom", bytes)
    other = tmp_path / "other"
    os.symlink(other, tmp_path / f".{staging.PREFIX}{os.getpid()}_{bytes(8).hex()}")
    with pytest.raises(FileExistsError):
        StagingFile(str(tmp_path), TENSORS)
    assert not other.exists()


def test_a_process_that_was_forked_from_a_trainer_leaves_its_file(staged):
    child = os.fork()
    if child == 0:
        staged.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.exists(staged.path)


def test_a_folder_without_room_is_an_error_that_leaves_no_file(tmp_path):
    with pytest.raises(OSError):
        StagingFile(str(tmp_path), {"x": ("float32", [1 << 50])})
    assert list(tmp_path.iterdir()) == []


def test_files_of_dead_trainers_are_removed_and_those_of_living_ones_stay(staged, tmp_path):
    child = os.fork()
    if child == 0:
        file = StagingFile(str(tmp_path), {"x": ("float32", [1])})
        os.kill(os.getpid(), signal.SIGKILL)
        file.remove()  # not reached
    assert os.waitpid(child, 0) == (child, signal.SIGKILL)
    [dead] = {str(path) for path in tmp_path.iterdir()} - {staged.path}
    assert remove_abandoned(str(tmp_path)) == [dead]
    assert [str(path) for path in tmp_path.iterdir()] == [staged.path]


def test_a_file_that_is_not_locked_yet_is_not_taken_for_an_abandoned_one(tmp_path, monkeypatch):
    flock = staging.fcntl.flock

    def lock(file, operation):
        monkeypatch.undo()
        assert remove_abandoned(str(tmp_path)) == []  # another trainer starts just now
        flock(file, operation)

    monkeypatch.setattr(staging.fcntl, "flock", lock)
    made = StagingFile(str(tmp_path), {"a": ("float32", [2])})
    assert Path(made.path).exists() and [path.name for path in tmp_path.iterdir()] == [Path(made.path).name]
    made.remove()
