"""Whether a disk can take what a run will write: asked of it beforehand, and nothing is left there."""

import shutil
from types import SimpleNamespace

import pytest
from accelerate import DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainingArguments

from trl_fp8.run.launch import checkpoint_bytes, launch_words, require_columns, require_known_commit, require_output


GIB = 2**30


@pytest.fixture
def free(monkeypatch, tmp_path):
    """`free(gib)`: the disk has that much left."""
    usage = shutil.disk_usage(tmp_path)

    def free(gib, total=1):
        changed = usage._replace(free=int(gib * GIB), total=total)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: changed)

    return free


def arguments(folder, **flags):
    return TrainingArguments(str(folder), use_cpu=True, report_to="none", **flags)


def test_a_folder_that_can_be_made_is_not_made(tmp_path):
    require_output(arguments(tmp_path / "a" / "b"), 1, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    for folder, below in ((tmp_path / "file" / "run", tmp_path / "file"), ("/proc/run", "/proc")):  # not even by root
        with pytest.raises(ValueError, match=f"output_dir='{folder}': {below} cannot be written .*Set output_dir"):
            require_output(arguments(folder), 1, 1)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ({}, "a checkpoint takes 3.0 GiB \\(weights 1.0 GiB, optimizer 2.0 GiB\\).* or leave the optimizer out"),
        ({"save_only_model": True}, "a checkpoint takes 1.0 GiB \\(weights 1.0 GiB\\). Make room, set"),
        ({"optim": "adafactor"}, "a checkpoint takes 1.0 GiB"),
        ({"save_strategy": "no"}, "the model takes 1.0 GiB"),
    ],
)
def test_a_disk_without_room_for_one_checkpoint_is_named(flags, needed, tmp_path, free):
    args = arguments(tmp_path, **flags)
    free(0.9)
    with pytest.raises(ValueError, match=f"output_dir='{tmp_path}': its disk has 921.6 MiB left, and {needed}"):
        require_output(args, GIB, GIB)
    free(3.0 if not flags else 1.0)
    require_output(args, GIB, GIB)
    free(0, total=0)
    require_output(args, GIB, GIB)


def test_adapters_alone_are_in_a_checkpoint_of_a_model_with_adapters():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    assert checkpoint_bytes(model) == (2 * 4 * 64, 4 * 64)
    assert checkpoint_bytes(model, has_average=True) == (4 * 4 * 64, 4 * 64)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["1"]))
    assert checkpoint_bytes(adapted) == (2 * 4 * 16, 2 * 4 * 16)


@pytest.mark.parametrize(
    "kind, processes, plugins, words",
    [
        (DistributedType.NO, 1, {}, "1 process"),
        (DistributedType.MULTI_CPU, 2, {}, "2 processes, DDP"),
        (DistributedType.MULTI_GPU, 8, {}, "8 processes, DDP"),
        (DistributedType.FSDP, 2, {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, "2 processes, FSDP2"),
        (DistributedType.FSDP, 1, {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, "1 process, FSDP2"),
        (DistributedType.DEEPSPEED, 4, {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "4 processes, ZeRO-3"),
    ],
)
def test_a_launch_is_named_as_it_is_not_as_it_was_asked_for(kind, processes, plugins, words):
    state = SimpleNamespace(**({"deepspeed_plugin": None, "fsdp_plugin": None} | plugins))
    assert launch_words(SimpleNamespace(distributed_type=kind, num_processes=processes, state=state)) == words


def exact(completions, solution, **kwargs):
    return [0.0 for _ in completions]


class Judged:
    """A reward that is an object."""

    def __call__(self, prompts, completions, answer, weight=1.0, *, log_metric, **kwargs):
        return [0.0 for _ in completions]


@pytest.mark.parametrize("fields", [{}, {"_commit_hash": None}])
def test_a_revision_is_refused_where_transformers_keeps_no_commit(fields, tmp_path):
    config = SimpleNamespace(name_or_path="user/model", **fields)
    with pytest.raises(ValueError, match="revision='v2', but this version of transformers keeps no commit"):
        require_known_commit(config, {"revision": "v2", "dtype": "float32"})
    for known in ({"revision": "main"}, {}, None):
        require_known_commit(config, known)
    for config in (
        SimpleNamespace(name_or_path="user/model", _commit_hash="a" * 40),
        SimpleNamespace(name_or_path=str(tmp_path)),
    ):
        require_known_commit(config, {"revision": "v2"})


def test_columns_that_prompts_and_rewards_come_from_are_asked_for():
    rows = Dataset.from_list([{"question": "1+1=", "answer": "2"}])
    with pytest.raises(ValueError, match=r"^train_dataset has no column 'prompt', but 'question', 'answer'\. Rename"):
        require_columns({"train_dataset": rows}, [], adds_columns=False)
    with pytest.raises(ValueError, match="^eval_dataset is empty"):
        require_columns({"eval_dataset": Dataset.from_list([])}, [], adds_columns=False)
    rows = rows.rename_column("question", "prompt")
    require_columns({"train_dataset": rows, "eval_dataset": None}, ["a/model", Judged(), nn.Linear(1, 1)], False)
    streamed = {"train_dataset": rows, "eval_dataset": rows.to_iterable_dataset()}
    require_columns(streamed, [exact], adds_columns=True)
    with pytest.raises(
        ValueError, match=r"no column 'solution', which the reward exact takes, but 'prompt', 'answer'"
    ):
        require_columns(streamed, [exact], adds_columns=False)
    streamed["train_dataset"] = rows.rename_column("answer", "solution")
    with pytest.raises(ValueError, match=r"^eval_dataset has no column 'solution'"):
        require_columns(streamed, [exact], adds_columns=False)
