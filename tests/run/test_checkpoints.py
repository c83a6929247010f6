"""Which checkpoint `resume_from_checkpoint` means, and what is none."""

from types import SimpleNamespace

import pytest

from trl_fp8.run.checkpoints import (
    checkpoint_to_resume,
    checkpoints,
    forget_rollouts,
    marker,
    require_ranks,
    save_rollouts,
)


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 2, 9 and 10, the first and last of which were cut short."""
    for name in ("checkpoint-2", "checkpoint-9", "checkpoint-10", "checkpoint-best", "checkpoint-copy-11", "model"):
        (tmp_path / name).mkdir()
    for name in ("9", "10", "copy-11"):
        (tmp_path / f"checkpoint-{name}" / "trainer_state.json").touch()
    marker(tmp_path / "checkpoint-10").touch()
    (tmp_path / "model" / "config.json").touch()
    return tmp_path


@pytest.mark.parametrize("word", [True, "true", "True", "auto"])
def test_a_word_means_the_last_whole_checkpoint_or_the_beginning(word, run):
    assert checkpoint_to_resume(run, word) == str(run / "checkpoint-9")
    assert checkpoint_to_resume(run / "new", word) is None
    assert [path.name for path in checkpoints(run)[1]] == ["checkpoint-2", "checkpoint-10"]


@pytest.mark.parametrize("word", [None, False, "false", "False", ""])
def test_others_mean_the_beginning(word, run):
    assert checkpoint_to_resume(run, word) is None


def test_a_path_is_that_checkpoint_or_an_error_that_names_the_remedy(run, monkeypatch):
    whole = str(run / "checkpoint-9")
    assert checkpoint_to_resume(run, whole) == checkpoint_to_resume(run / "new", whole) == whole
    for name, reason in (
        ("checkpoint-2", f"no checkpoint of a run, for it has no trainer_state.json. Use resume.*{whole!r}"),
        ("checkpoint-10", f"was not written to its end.*{whole!r}"),
        ("checkpoint-3", f"there is no such folder, seen from .*{whole!r}"),
        ("model", "or give the folder as the model to train it further"),
    ):
        with pytest.raises(ValueError, match=f"resume_from_checkpoint='{run / name}': .*{reason}"):
            checkpoint_to_resume(run, str(run / name))
    monkeypatch.chdir(whole)
    assert checkpoint_to_resume(run, ".") == "."
    monkeypatch.chdir(run / "checkpoint-10")
    with pytest.raises(ValueError, match="resume_from_checkpoint='.': was not written to its end"):
        checkpoint_to_resume(run, ".")
    with pytest.raises(ValueError, match="Leave it out to start from the beginning"):
        checkpoint_to_resume(run / "new", str(run / "model"))


def test_rollouts_of_another_number_of_processes_are_refused(run):
    """Each file knows how many there are: a machine may hold those of its own processes alone."""
    folder = run / "checkpoint-9"
    require_ranks(folder, 3)
    save_rollouts(folder, SimpleNamespace(num_processes=2, process_index=1), 5, [], {})
    require_ranks(folder, 2)
    with pytest.raises(ValueError, match="generation of 2 processes.*among 3. Launch 2 processes"):
        require_ranks(folder, 3)
    forget_rollouts(folder)  # the checkpoint is written again
    require_ranks(folder, 3)
