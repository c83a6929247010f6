"""Which checkpoint `resume_from_checkpoint` means, and what is none."""

import pytest

from trl_fp8.run.checkpoints import checkpoint_to_resume, checkpoints, marker, require_ranks


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 2, 9 and 10, the first and last of which were cut short."""
    for name in ("checkpoint-2", "checkpoint-9", "checkpoint-10", "checkpoint-best", "model"):
        (tmp_path / name).mkdir()
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
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


def test_a_path_is_that_checkpoint_or_an_error_that_names_the_remedy(run):
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
    with pytest.raises(ValueError, match="Leave it out to start from the beginning"):
        checkpoint_to_resume(run / "new", str(run / "model"))


def test_rollouts_of_another_number_of_processes_are_refused_before_they_are_read(run):
    require_ranks(run / "checkpoint-9", 3)
    for rank in range(2):
        (run / "checkpoint-9" / f"rollouts_{rank}.pt").touch()
    require_ranks(run / "checkpoint-9", 2)
    with pytest.raises(ValueError, match="generation of 2 processes.*among 3. Launch 2 processes"):
        require_ranks(run / "checkpoint-9", 3)
