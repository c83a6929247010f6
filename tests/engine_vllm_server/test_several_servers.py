"""Deliveries to two servers, one of which fails. The servers are objects here."""

from contextlib import nullcontext
from itertools import count

import pytest
import torch

from testing import tiny_models
from testing.fake_server import Server
from testing.staged_trainer import SomeScales
from trl_fp8.engine.vllm_server import staged_engine
from trl_fp8.engine.vllm_server.client import ServerGone
from trl_fp8.engine.vllm_server.staged_engine import StagedEngine
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.delivery import InPlaceDelivery


class Trainer:
    """A policy and two servers, http://a and http://b."""

    def __init__(self, folder, patience=0.5, **changed_of_b):
        self.policy = tiny_models.build()
        recipe = recipe_for_model(self.policy)
        self.a, self.b = Server(self.policy, recipe), Server(self.policy, recipe)
        self.a.base_url, self.b.base_url = "http://a", "http://b"
        self.b.start("b")
        self.b.changed = changed_of_b
        self.engine = StagedEngine([self.a, self.b], self.policy, recipe, str(folder), patience=patience)
        carried = SomeScales(self.engine.kv_scales(), 2)
        self.delivery = InPlaceDelivery(self.engine, self.policy, recipe, carried=carried)

    def sync(self):
        """Change the policy and bring it to the servers. Return which updates of each were patches."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(torch.empty_like(parameter).uniform_(-1e-5, 1e-5))
        for server in (self.a, self.b):
            server.updates.clear()
        self.delivery.deliver(lambda: nullcontext(self.policy.named_parameters()))
        return [["patch" in update for update in server.updates] for server in (self.a, self.b)]

    def require_held(self, server):
        for worker in server.workers:
            for name, tensor in self.engine.layout.held.items():
                assert torch.equal(worker.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture
def trainer(tmp_path):
    torch.manual_seed(0)
    return Trainer(tmp_path)


class Gone:
    """A server that answers nothing inside the block, or not its first `calls` calls."""

    def __init__(self, server, calls=None):
        self._server, self._calls = server, calls

    def __enter__(self):
        calls = count(1)

        def called(name):
            if next(calls) == self._calls:  # the last one
                del self._server.called
            raise ServerGone(f"the server at {self._server.base_url} does not answer")

        self._server.called = called

    def __exit__(self, *error):
        vars(self._server).pop("called", None)


def warnings(caplog, text):
    return [record.message for record in caplog.records if text in record.message]


def test_both_servers_get_each_sync_as_a_patch_if_they_hold_its_base(trainer):
    assert trainer.sync() == [[False], [False]] and trainer.engine.served_by == 2
    for _ in range(2):
        assert trainer.sync() == [[True], [True]]
        trainer.delivery.verify()
        trainer.require_held(trainer.a)
        trainer.require_held(trainer.b)
        assert 0 < trainer.engine.patch_over_whole < 0.1


def test_a_server_that_is_lost_in_a_sync_is_left_out_and_gets_all_when_it_is_back(trainer, caplog):
    trainer.sync()
    with Gone(trainer.b):
        for _ in range(2):
            assert trainer.sync() == [[True], []] and trainer.engine.served_by == 1
            trainer.delivery.verify()
        trainer.require_held(trainer.a)
    assert len(warnings(caplog, "http://b is left out")) == 1 and not warnings(caplog, "is repeated")
    trainer.b.start("c")
    assert trainer.sync() == [[True], [False]] and trainer.engine.served_by == 2
    assert len(warnings(caplog, "http://b takes part again")) == 1
    trainer.require_held(trainer.b)
    assert trainer.sync() == [[True], [True]]


@pytest.mark.parametrize("call", ["pause", "update", "finish", "fp8_state", "reset", "resume"])
def test_a_server_that_ends_in_the_middle_of_an_update_does_not_stop_the_other_one(call, trainer, caplog):
    trainer.sync()
    trainer.a.fail = {call: ServerGone("http://a does not answer")}
    assert trainer.sync()[1] == [True] and trainer.engine.served_by == 1
    trainer.delivery.verify()
    trainer.require_held(trainer.b)
    assert "http://a is left out until a sync reaches it again: http://a does not answer" in caplog.text
    assert trainer.sync() == [[False], [True]] and trainer.engine.served_by == 2
    trainer.require_held(trainer.a)


def test_without_any_server_the_sync_waits_for_one_and_then_ends_with_the_error(trainer):
    trainer.sync()
    with Gone(trainer.a), Gone(trainer.b), pytest.raises(ServerGone, match="http://. does not answer"):
        trainer.sync()
    with pytest.raises(RuntimeError, match="no complete policy"):
        trainer.delivery.verify()
    assert trainer.sync() == [[False], [False]]


def test_without_any_server_the_sync_goes_on_with_the_first_one_that_answers_again(trainer, caplog):
    trainer.sync()
    with Gone(trainer.a), Gone(trainer.b, calls=1):
        assert trainer.sync() == [[], [True]]
    assert not warnings(caplog, "is repeated")
    trainer.require_held(trainer.b)
    assert trainer.sync() == [[False], [True]]


def test_every_server_is_called_before_the_patience_ends(tmp_path):
    trainer = Trainer(tmp_path, patience=0)
    trainer.sync()
    with Gone(trainer.a):
        assert trainer.sync() == [[], [True]]


def test_a_server_that_was_started_again_before_a_generation_is_left_out_of_it(trainer, caplog):
    trainer.sync()
    trainer.b.start("c")
    trainer.delivery.verify()
    assert [server.base_url for server in trainer.engine.serving] == ["http://a"]
    assert "http://b is left out until a sync reaches it again: http://b was started again" in caplog.text
    trainer.a.start("d")
    with pytest.raises(RuntimeError, match="http://a was started again since the last sync"):
        trainer.delivery.verify()
    assert trainer.sync() == [[False], [False]]


def test_an_error_of_one_server_that_answers_stops_the_sync_and_names_it(trainer, caplog):
    trainer.sync()
    trainer.b.workers[1].error = "ValueError: torn"
    with pytest.raises(RuntimeError, match="http://b: worker 1: ValueError: torn"):
        trainer.sync()
    trainer.b.workers[1].error = ""
    assert trainer.sync() == [[False], [False]]


def test_bytes_that_one_server_lost_are_named_with_it(trainer):
    trainer.sync()
    worker = trainer.b.workers[1]
    read = worker.read

    def lossy(update):
        read(update)
        worker.tensors["model.norm.weight"].mul_(2)
        worker.parts["model.norm.weight"] = worker.arrived["model.norm.weight"] = 7

    worker.read = lossy
    message = "1 tensors hold other bytes than were sent: model.norm.weight. At http://b: model.norm.weight. The"
    with pytest.raises(RuntimeError, match=message):
        trainer.sync()
    worker.read = read
    assert trainer.sync() == [[False], [False]]
    worker.tensors["model.norm.weight"].mul_(2)
    message = "1 tensors of the engine have changed.*: model.norm.weight. At http://b: model.norm.weight. Something"
    with pytest.raises(RuntimeError, match=message):
        trainer.delivery.verify()
    assert trainer.sync() == [[True], [False]]
    trainer.require_held(trainer.b)


def test_zeros_that_one_server_does_not_hold_are_found_although_their_checksum_is_zero(trainer):
    trainer.policy.model.norm.weight.requires_grad_(False).zero_()
    for worker in trainer.b.workers:
        worker.read = lossy_read(worker)
    message = "1 tensors hold other bytes than were sent: model.norm.weight. At http://b: model.norm.weight. The"
    with pytest.raises(RuntimeError, match=message):
        trainer.delivery.deliver(lambda: nullcontext(trainer.policy.named_parameters()))


def test_both_servers_with_the_same_wrong_bytes_fail_the_audit(trainer):
    for server in (trainer.a, trainer.b):
        for worker in server.workers:
            worker.arrived_before, worker.read = worker.read, lossy_read(worker)
    with pytest.raises(RuntimeError, match="1 tensors hold other bytes than were sent: model.norm.weight"):
        trainer.sync()


def lossy_read(worker):
    read = worker.read

    def lossy(update):
        read(update)
        worker.arrived["model.norm.weight"] = 7

    return lossy


def test_scales_that_one_server_lost_are_named_with_it(trainer):
    trainer.sync()
    trainer.b.workers[1].wrong_scales = "a copy of layer 0 is 1.0"
    with pytest.raises(RuntimeError, match="worker 1 of http://b: a copy of layer 0 is 1.0"):
        trainer.delivery.verify()


@pytest.mark.parametrize(
    "changed, named", [({"kernels": {"Other": 14}}, "kernels"), ({"context": 32}, "context 64, 32")], ids=["k", "c"]
)
def test_a_server_that_computes_otherwise_than_the_others_is_refused_at_the_start(changed, named, tmp_path):
    with pytest.raises(ValueError, match=f"http://b computes otherwise than http://a: {named}"):
        Trainer(tmp_path, **changed)


def test_a_server_with_other_buffers_than_the_others_is_refused(trainer):
    for worker in trainer.b.workers:
        worker.constants = "6"
    with pytest.raises(ValueError, match="http://b has other buffers than http://a"):
        trainer.sync()


def test_one_server_under_two_names_is_refused(tmp_path):
    policy = tiny_models.build()
    recipe = recipe_for_model(policy)
    server, other_name = Server(policy, recipe), Server(policy, recipe)
    other_name.base_url = "http://127.0.0.1"
    with pytest.raises(ValueError, match="http://server and http://127.0.0.1 are one server. Name each of them once"):
        StagedEngine([server, other_name], policy, recipe, str(tmp_path), patience=0.5)


def test_after_an_error_in_the_search_for_changes_all_is_sent(trainer, monkeypatch):
    """A part of the file is newer then, and a second search would not find it."""
    trainer.sync()
    find = staged_engine.bring_up_to_date

    def fails_once(sent, staged, table):
        monkeypatch.undo()
        find(sent, staged, table)
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(staged_engine, "bring_up_to_date", fails_once)
    assert trainer.sync() == [[False], [False]]
    trainer.delivery.verify()
    trainer.require_held(trainer.a)
