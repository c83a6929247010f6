"""A disk that fills up while a run saves: a real one, of a few MiB, and the way on that the error tells."""

import os
import shutil
import subprocess

import pytest

from testing.fake_rollout_engine import FakeEngineTrainer
from testing.runs import arguments, dataset, reward_digits
from trl_fp8.run.full_disk import FullDisk, explained_full_disk


@pytest.fixture(params=["6m", "7m"], ids=["weights", "optimizer"])  # what of the second checkpoint finds no room
def disk(request, tmp_path):
    """A file system that holds one checkpoint and a part of a second one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "none", str(folder)]
    if os.getuid() != 0 or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def trainer(model, folder, **flags):
    flags = {"kv_cache_dtype": "auto", "save_strategy": "steps", "save_steps": 1, "max_steps": 3} | flags
    return FakeEngineTrainer(model, reward_digits, arguments(folder, **flags), dataset())


def no_checkpoint() -> None:
    """Stand for `last_checkpoint` of a run that has saved none."""


def test_a_run_that_finds_no_room_for_a_checkpoint_says_how_to_go_on(disk, checkpoint):
    model = checkpoint("qwen3")
    with pytest.raises(FullDisk) as raised:
        trainer(model, disk / "run").train()
    said = str(raised.value)
    assert said.startswith(f"no room for checkpoint-2 in {disk / 'run'}: its disk is full (")
    assert said.endswith(
        "). Make room; checkpoint-2 is incomplete and can be deleted; then resume_from_checkpoint='auto' goes on from "
        "checkpoint-1."
    )
    shutil.rmtree(disk / "run" / "checkpoint-2")
    resumed = trainer(model, disk / "run", save_strategy="no")
    resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 3
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
    with pytest.raises(FullDisk, match="no room for what the run writes .*goes on from checkpoint-1"):
        resumed.save_model()


def test_other_errors_of_a_run_are_what_they_are(tmp_path):
    elsewhere = OSError(28, "No space left on device", "/nowhere/compiled.so")
    of_server = OSError(28, "No space left on device", "http://127.0.0.1:8000/fp8_upload")
    others = RuntimeError("CUDA error"), OSError(2, "No such file"), ValueError("no room")
    for error in (*others, elsewhere, of_server):
        with pytest.raises(type(error)) as raised, explained_full_disk(tmp_path, no_checkpoint):
            raise error
        assert raised.value is error


def test_an_error_on_a_host_without_the_folder_is_what_it_is(tmp_path):
    with (
        pytest.raises(RuntimeError, match="CUDA error"),
        explained_full_disk(tmp_path / "of the first host", no_checkpoint),
    ):
        raise RuntimeError("CUDA error")


def test_a_full_disk_behind_another_error_is_seen(tmp_path):
    with pytest.raises(
        FullDisk, match="start again without resume_from_checkpoint, for this run has no checkpoint yet"
    ):
        with explained_full_disk(tmp_path, no_checkpoint):
            try:
                raise OSError(28, "No space left on device")
            except OSError as error:
                raise RuntimeError("inline_container.cc: unexpected pos") from error


def test_the_message_names_the_checkpoint_of_this_run_and_not_one_of_an_earlier_run(tmp_path):
    for step in (2, 100, 900):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    own = str(tmp_path / "checkpoint-2")
    unfinished = tmp_path / "checkpoint-4"
    unfinished.mkdir()
    (tmp_path / "checkpoint-900" / "trainer_state.json").unlink()  # an earlier run did not finish it
    os.utime(tmp_path / "checkpoint-900", (0, 0))
    with pytest.raises(FullDisk) as raised, explained_full_disk(tmp_path, lambda: own):
        raise OSError(28, "No space left on device")
    assert str(raised.value).endswith(
        f"checkpoint-4 is incomplete and can be deleted; then resume_from_checkpoint={own!r} goes on from it."
    )
    with pytest.raises(FullDisk, match="for this run has no checkpoint yet"):
        with explained_full_disk(tmp_path, no_checkpoint):
            raise OSError(28, "No space left on device")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FullDisk, match="what the run writes in .*resume_from_checkpoint='.*checkpoint-2' goes on"):
        with explained_full_disk(empty, lambda: own):
            raise OSError(28, "No space left on device")
