"""Which checkpoint `resume_from_checkpoint` means, and what is none."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_fp8.run import checkpoints as module
from trl_fp8.run.checkpoints import (
    checkpoint_to_resume,
    checkpoints,
    forget_rollouts,
    has_training_state,
    marker,
    require_ranks,
    sampling_of,
    save_rollouts,
)
from trl_fp8.run.saving import Saving


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


class Trainer:
    """As much of a trainer as `Saving` needs to resume."""

    def _load_optimizer_and_scheduler(self, checkpoint):
        pass


class Resumed(Saving, Trainer):
    features = ()
    is_deepspeed_enabled = is_fsdp_enabled = False

    def __init__(self, folder, steps_per_generation=4):
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
        self.accelerator.is_main_process = True
        self.args = SimpleNamespace(output_dir=str(folder), own_engine=True, load_best_model_at_end=False)
        self.args.steps_per_generation = steps_per_generation
        vars(self.args).update(temperature=1.0, top_p=1.0, top_k=0, min_p=None, generation_kwargs=None)
        self.model = nn.Linear(1, 1)


@pytest.mark.parametrize("steps", [2, 4, 8])
def test_rollouts_of_another_number_of_slices_are_refused(steps, run):
    """With fewer a resumed run would train twice on some of them, with more it would end with an IndexError."""
    folder = str(run / "checkpoint-9")
    trainer = Resumed(run, steps)
    save_rollouts(folder, trainer.accelerator, 6, [{"prompt_ids": torch.ones(1, 2)}] * 4, sampling_of(trainer.args))
    if steps == 4:
        trainer._load_optimizer_and_scheduler(folder)
        assert trainer._step == 6 and len(trainer._buffered_inputs) == 4
        return
    said = f"falls into a generation with steps_per_generation=4.*this run has steps_per_generation={steps}"
    with pytest.raises(ValueError, match=said):
        trainer._load_optimizer_and_scheduler(folder)


def test_machines_that_do_not_share_checkpoints_are_refused(run, monkeypatch):
    """With 'auto' those without a checkpoint would start from the beginning, while the others resume."""
    monkeypatch.setattr(module, "gather_object", lambda names: [*names, *names, "none"])
    said = r"the same checkpoints on all machines.*: checkpoint-9 \(2 of 3 ranks\), none \(1 of 3 ranks\)\. Set"
    with pytest.raises(ValueError, match=said):
        Resumed(run).train("auto")


def test_a_checkpoint_of_weights_alone_is_told_from_a_whole_one(run):
    assert not has_training_state(run / "checkpoint-9")
    (run / "checkpoint-9" / "rng_state_0.pth").touch()
    assert has_training_state(run / "checkpoint-9")
