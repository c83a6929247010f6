"""A model that is an average of policies (a reference, a teacher) comes back with a checkpoint."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from trl_fp8.run import averaged
from trl_fp8.run.averaged import FILE, AveragedModel, has_average


EMA = {"teacher_model_kind": "ema"}


def feature_of(averaged, args, rank=0, model=None):
    is_first = rank == 0
    accelerator = SimpleNamespace(
        process_index=rank, is_main_process=is_first, is_local_main_process=is_first, unwrap_model=lambda model: model
    )
    models = {"model": model, "ref_model": averaged, "teacher_model": averaged}
    config = SimpleNamespace(save_on_each_node=False, **args)
    return AveragedModel(SimpleNamespace(args=config, accelerator=accelerator, **models))


@pytest.mark.parametrize("args", [{"sync_ref_model": True}, EMA])
def test_every_rank_reads_the_weights_that_the_first_one_wrote(args, tmp_path):
    averaged = nn.Linear(3, 2)
    feature_of(averaged, args, rank=1).save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    feature_of(averaged, args).save(tmp_path)
    for rank in (0, 1):
        resumed = nn.Linear(3, 2)
        feature_of(resumed, args, rank=rank).load(tmp_path)
        assert torch.equal(resumed.weight, averaged.weight) and torch.equal(resumed.bias, averaged.bias)


def test_averaged_adapters_are_left_to_trl(tmp_path):
    policy = nn.Linear(3, 2)
    feature = feature_of(policy, EMA, model=policy)  # the policy's own model holds both adapters
    feature.save(tmp_path)
    feature.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [{}, {"sync_ref_model": False}, {"teacher_model_kind": "base"}])
def test_a_run_without_an_average_does_not_look_for_one(args):
    assert not has_average(SimpleNamespace(**args))
    assert has_average(SimpleNamespace(**args | {"sync_ref_model": True}))


def test_a_file_that_another_rank_does_not_see_is_refused_on_all(tmp_path, monkeypatch):
    """Otherwise ranks would go on with different averages."""
    feature_of(nn.Linear(3, 2), EMA).save(tmp_path)
    monkeypatch.setattr(averaged, "gather_object", lambda findings: [*findings, (False, False)])
    with pytest.raises(ValueError, match="some ranks do not see their file"):
        feature_of(nn.Linear(3, 2), EMA).load(tmp_path)


def test_weights_of_another_model_are_refused_and_a_file_that_is_missing_is_named(tmp_path, caplog):
    Accelerator(cpu=True)  # without which accelerate logs nothing
    feature_of(nn.Linear(3, 2), EMA).load(tmp_path)
    assert f"has no {FILE.format(0)}: the model that is an average" in caplog.text
    feature_of(nn.Linear(3, 2), EMA).save(tmp_path)
    with pytest.raises(ValueError, match="averaged_0.pt has the weights of another model, or of another number of"):
        feature_of(nn.Linear(4, 2), EMA).load(tmp_path)
