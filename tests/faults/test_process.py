"""Processes that die, disks that are full: what is left is whole or is not picked up."""

import resource
import signal
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing.runs import arguments, column, training
from trl_fp8.export import export
from trl_fp8.export.export import export_fp8
from trl_fp8.export.file_checksums import verify_export
from trl_fp8.features.run_log.log_file import FILE
from trl_fp8.run.checkpoints import marker

from .dying import FLAGS, PLACES, die


@pytest.fixture
def small(checkpoint):
    folder = checkpoint("qwen3")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.engine
def test_an_export_that_is_killed_leaves_no_folder_and_can_be_repeated(small, dead):
    (left,) = (dead / "export").iterdir()  # temporary, with a name that says so
    assert left.name.startswith(".fp8-") and len(list(left.glob("*.safetensors"))) == 3
    export_fp8(*small, dead / "export" / "fp8")
    assert verify_export(dead / "export" / "fp8") > 3


@contextmanager
def full_disk():
    """No file may grow beyond 100 KB: every write to it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_an_export_onto_a_full_disk_is_an_oserror_and_leaves_nothing(small, tmp_path):
    with full_disk(), pytest.raises(OSError, match="fp8"):
        export_fp8(*small, tmp_path / "fp8")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_interrupted_leaves_nothing(small, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "write_checksums", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export_fp8(*small, tmp_path / "fp8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
def test_a_checkpoint_onto_a_full_disk_ends_the_run_and_the_last_whole_one_stays(expected, checkpoint, tmp_path):
    with training(checkpoint("qwen3"), arguments(tmp_path, **FLAGS)) as trainer:
        save = trainer._save_checkpoint

        def fills_up(*args):
            with full_disk() if trainer.state.global_step == 2 else nullcontext():
                save(*args)

        trainer._save_checkpoint = fills_up
        with pytest.raises(Exception, match="no room for checkpoint-2 in .*auto. goes on from checkpoint-1"):
            trainer.train()
    assert marker(tmp_path / "checkpoint-2").exists() and not marker(tmp_path / "checkpoint-1").exists()
    with training(checkpoint("qwen3"), arguments(tmp_path, **FLAGS)) as trainer:
        trainer.train(resume_from_checkpoint=True)
        assert column(trainer, "loss") == expected


@pytest.mark.engine
def test_a_full_disk_under_the_run_log_does_not_end_the_run(checkpoint, tmp_path, caplog):
    with training(checkpoint("qwen3"), arguments(tmp_path, max_steps=2)) as trainer:
        (tmp_path / FILE).mkdir()  # as unwritable as it gets, also for root
        trainer.train()
        assert trainer.state.global_step == 2
    assert caplog.text.count(f"{FILE} cannot be written") == 1


@pytest.fixture(scope="module")
def dead(checkpoint, tmp_path_factory):
    """Folder with the output folders of the runs that died."""
    folder = tmp_path_factory.mktemp("dead")
    die(checkpoint("qwen3"), folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint, tmp_path_factory):
    """Losses of a run that nobody killed."""
    with training(checkpoint("qwen3"), arguments(tmp_path_factory.mktemp("whole"), **FLAGS)) as trainer:
        trainer.train()
        return column(trainer, "loss")


@pytest.mark.engine
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_resumes_from_its_last_whole_checkpoint(place, dead, expected, checkpoint):
    """Whatever is there, `resume_from_checkpoint=True` ends as the run that nobody killed."""
    folder = dead / place
    assert (folder / "checkpoint-1").is_dir() and not (folder / "checkpoint-3").exists()
    half = folder / "checkpoint-2"
    assert half.is_dir() and marker(half).exists() == (place != "in_the_sync")
    with training(checkpoint("qwen3"), arguments(folder, **FLAGS)) as trainer:
        if place != "in_the_sync":
            with pytest.raises(ValueError, match="checkpoint-2.*was not written to its end.*checkpoint-1"):
                trainer.train(resume_from_checkpoint=str(half))
        trainer.train(resume_from_checkpoint=True)
        assert column(trainer, "loss") == expected


def test_output_that_cannot_be_written_is_named(checkpoint, tmp_path):
    Path(tmp_path, "file").write_text("")
    with pytest.raises(ValueError, match="output_dir=.*file cannot be written"):
        with training(checkpoint("qwen3"), arguments(tmp_path / "file" / "run")):
            pass
