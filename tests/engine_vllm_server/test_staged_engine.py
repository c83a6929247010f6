"""Deliveries to a server: what its workers have to answer, and what is refused. The server is an object here."""

import copy
import gc
import os
from contextlib import nullcontext

import pytest
import torch

from testing import tiny_models
from testing.engines import perturb, some_scales
from testing.staged_trainer import SomeScales
from trl_fp8.engine.vllm_server.numbers import numbers_of
from trl_fp8.engine.vllm_server.staged_engine import StagedEngine
from trl_fp8.engine.vllm_server.staging import opened
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.delivery import InPlaceDelivery
from trl_fp8.sync.weight_stream import weight_stream


class Worker:
    """A worker that holds whole tensors."""

    def __init__(self, instance):
        self.instance, self.tensors, self.arrived, self.parts = instance, {}, {}, {}
        self.version, self.error, self.scales, self.staged = -1, "", None, {}
        self.constants = "5"

    def read(self, update):
        self.arrived = {name: digest(tensor).item() for name, tensor in self.staged.items()}
        self.parts = dict(self.arrived)
        self.tensors = {name: tensor.clone() for name, tensor in self.staged.items()}
        self.scales = update["kv_scales"]

    def state(self):
        now = {name: digest(tensor).item() for name, tensor in self.tensors.items()}
        return {
            "instance": self.instance,
            "version": self.version,
            "error": self.error,
            "arrived": {name: str(each) for name, each in self.arrived.items()},
            "differ": [name for name in now if now[name] != self.parts[name]],
            "constants": [self.constants],
            "kv_scales": self.scales,
            "kv_wrong": "",
        }


class Server:
    """A `Control` and the server behind it, with two workers. `fail` (call -> error) raises once."""

    base_url = "http://server"

    def __init__(self, policy, recipe):
        self.calls, self.fail, self.resets = [], {}, True
        self.tensors = {recipe.engine_name(name): "bfloat16" for name, _ in policy.named_parameters()}
        for name in recipe.fp8_tensors:
            self.tensors |= {recipe.engine_name(name): "float8_e4m3fn", recipe.scale_name(name): "float32"}
        self.numbers = numbers_of(policy.config)
        self.changed = {}  # of what the workers describe
        self.fp8_cache = []
        if recipe.fp8_kv_cache:
            layers = range(policy.config.num_hidden_layers)
            self.fp8_cache = [layer for layer in layers if layer not in recipe.kv_cache_skip_layers]
        self.start("a")

    def start(self, instance):
        self.workers = [Worker(instance + "0"), Worker(instance + "1")]

    def called(self, name):
        self.calls.append(name)
        if name in self.fail:
            raise self.fail.pop(name)

    def wait_until_up(self, seconds):
        self.called("wait_until_up")

    def rpc(self, method, *args):
        self.called(method)
        if method == "fp8_state":
            return [worker.state() for worker in self.workers]
        described = {"kernels": {"Kernel": 14}, "linears": None, "query_rounded": False, "derived": []}
        described |= {"fp8_cache": self.fp8_cache, "context": 64, "numbers": self.numbers} | self.changed
        return [{"instance": worker.instance, "tensors": self.tensors} | described for worker in self.workers]

    def init_weight_transfer_engine(self, init_info):
        self.called("init")
        self.init = init_info
        for worker in self.workers:
            worker.staged = opened(init_info["path"], init_info["table"])

    def start_weight_update(self):
        self.called("start")
        for worker in self.workers:
            worker.version = -1

    def update_weights(self, update):
        self.called("update")
        self.version = update["version"]
        for worker in self.workers:
            worker.read(update)

    def finish_weight_update(self, weight_version):
        self.called("finish")
        for worker in self.workers:
            worker.version = self.version

    def pause(self):
        self.called("pause")

    def resume(self):
        self.called("resume")

    def reset_prefix_cache(self):
        self.called("reset")
        return self.resets


SCALE = "model.layers.0.mlp.down_proj.weight_scale_inv"
PUSH = ["pause", "start", "update", "finish", "fp8_state"]


@pytest.fixture
def policy():
    return tiny_models.build()


@pytest.fixture
def server(policy):
    return Server(policy, recipe_for_model(policy))


@pytest.fixture
def engine(policy, server, tmp_path):
    return StagedEngine(server, policy, recipe_for_model(policy), str(tmp_path), patience=1)


@pytest.fixture
def delivery(policy, engine):
    return InPlaceDelivery(engine, policy, recipe_for_model(policy), carried=SomeScales(engine.kv_scales(), 2))


def deliver(delivery, policy):
    return delivery.deliver(lambda: nullcontext(policy.named_parameters()))


def test_each_worker_holds_the_quantized_policy_and_its_scales_after_each_sync(policy, server, delivery):
    recipe = recipe_for_model(policy)
    for step in (1, 2):
        perturb(policy, step)
        delivery.carried.value = some_scales(2, step)
        report = deliver(delivery, policy)
        delivery.verify()
        for worker in server.workers:
            assert worker.version == step and worker.scales == some_scales(2, step).values.tolist()
            assert report.audited_tensors == len(worker.tensors) == len(server.tensors)
            expected = dict(weight_stream(policy.named_parameters(), recipe))
            assert worker.tensors.keys() == expected.keys()
            for name, tensor in worker.tensors.items():
                assert torch.equal(tensor.float(), expected[name].to(tensor.dtype).float()), name


def test_what_is_written_on_a_device_is_copied_to_the_file_before_the_pause(policy, server, tmp_path, monkeypatch):
    recipe = recipe_for_model(policy)
    engine = StagedEngine(server, policy, recipe, str(tmp_path), 1, torch.device("cpu"))
    delivery = InPlaceDelivery(engine, policy, recipe, carried=SomeScales(engine.kv_scales(), 2))
    for step in (1, 2):
        perturb(policy, step)
        deliver(delivery, policy)
        for worker in server.workers:
            assert worker.tensors.keys() == engine.layout.held.keys()
            assert all(torch.equal(worker.tensors[name], held) for name, held in engine.layout.held.items())
    perturb(policy, 3)
    monkeypatch.setattr(engine, "_copy_to_file", lambda: None)  # the server would go on with the second policy
    with pytest.raises(RuntimeError, match="weight sync failed its audit: .* hold other bytes than were sent"):
        deliver(delivery, policy)


def test_a_server_is_connected_once_and_paused_until_the_audit_has_passed(policy, server, delivery):
    deliver(delivery, policy)
    connect = ["wait_until_up", "fp8_instance", "wait_until_up", "fp8_describe", "init", "fp8_state"]
    assert server.calls == ["wait_until_up", "fp8_describe", *connect, *PUSH, "fp8_state", "reset", "resume"]
    server.calls.clear()
    deliver(delivery, policy)
    assert server.calls == ["wait_until_up", "fp8_instance", *PUSH, "fp8_state", "reset", "resume"]


def test_a_failed_push_is_repeated_once_with_the_next_version(policy, server, delivery):
    server.fail = {"update": RuntimeError("http://server/update_weights: 500")}
    deliver(delivery, policy)
    delivery.verify()
    assert server.calls.count("update") == 2 and {worker.version for worker in server.workers} == {2}


def test_a_server_that_fails_twice_is_not_resumed(policy, server, delivery):
    for worker in server.workers:
        worker.error = "ValueError: torn"
    with pytest.raises(RuntimeError, match="worker 0: ValueError: torn"):
        deliver(delivery, policy)
    assert "resume" not in server.calls
    with pytest.raises(RuntimeError, match="no complete policy"):
        delivery.verify()


def test_bytes_that_a_worker_lost_fail_the_audit_by_name(policy, server, delivery):
    read, name = server.workers[1].read, "model.norm.weight"

    def lossy(update):
        read(update)
        server.workers[1].tensors[name].mul_(2)

    server.workers[1].read = lossy
    with pytest.raises(RuntimeError, match=f"1 tensors hold other bytes than were sent: {name}"):
        deliver(delivery, policy)
    assert "resume" not in server.calls and delivery.failures == 1


def test_a_worker_that_read_another_trainers_file_fails_the_audit(policy, server, delivery, tmp_path):
    other = copy.deepcopy(policy)
    perturb(other, 9)
    staged = StagedEngine(Server(other, recipe_for_model(other)), other, recipe_for_model(other), str(tmp_path), 1)
    deliver(InPlaceDelivery(staged, other, recipe_for_model(other)), other)
    read = server.workers[0].read

    def foreign(update):
        server.workers[0].staged = opened(staged._file.path, staged._file.table)
        read(update)

    server.workers[0].read = foreign
    with pytest.raises(RuntimeError, match="hold other bytes than were sent"):
        deliver(delivery, policy)


def test_another_cache_than_the_trainers_is_refused_at_the_start(policy, server, tmp_path):
    with pytest.raises(ValueError, match=r"FP8 KV cache in the layers \[0, 1\].*flags say \[\]"):
        StagedEngine(server, policy, recipe_for_model(policy, kv_cache_dtype="auto"), str(tmp_path), 1)
    server.fp8_cache = [1]
    with pytest.raises(ValueError, match=r"FP8 KV cache in the layers \[1\].*flags say \[0, 1\]"):
        StagedEngine(server, policy, recipe_for_model(policy), str(tmp_path), 1)


@pytest.mark.parametrize("error", [RuntimeError("gone"), ValueError("TRL_FP8_TOKEN is not the token")])
def test_a_server_that_cannot_be_asked_stops_a_generation_on_all_ranks(error, policy, server, delivery):
    deliver(delivery, policy)
    server.fail = {"fp8_state": error}
    with pytest.raises(RuntimeError, match=str(error)):
        delivery.verify()


def test_a_tensor_that_changes_after_a_sync_is_named_before_a_generation(policy, server, delivery):
    deliver(delivery, policy)
    server.workers[1].tensors["model.norm.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="1 tensors of the engine have changed.*model.norm.weight"):
        delivery.verify()


def test_kv_scales_that_one_worker_does_not_hold_are_refused(policy, server, delivery):
    read = server.workers[1].read
    server.workers[1].read = lambda update: read(update | {"kv_scales": some_scales(2, 3).values.tolist()})
    with pytest.raises(RuntimeError, match="scales did not arrive in worker 1 of http://server"):
        deliver(delivery, policy)


def test_a_server_that_was_started_again_is_found_and_connected_anew(policy, server, delivery):
    deliver(delivery, policy)
    server.start("b")
    with pytest.raises(RuntimeError, match="was started again since the last sync"):
        delivery.verify()
    server.calls.clear()
    deliver(delivery, policy)
    delivery.verify()
    assert "init" in server.calls and server.workers[0].tensors


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"kernels": {"Other": 14}}, r"kernels \(Kernel 14, None, Other None, 14\)"),
        ({"linears": ["pow2", 1e-10, "block", False]}, "linears None, .'pow2'"),
        ({"query_rounded": True}, "query_rounded False, True"),
        ({"context": 32}, "context 64, 32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_that_computes_otherwise_after_a_restart_is_refused_by_name(changed, named, policy, server, delivery):
    deliver(delivery, policy)
    server.start("b")
    server.changed = changed
    with pytest.raises(ValueError, match=f"started again and computes otherwise than before: {named}"):
        deliver(delivery, policy)


def test_a_server_whose_buffers_differ_after_a_restart_is_refused(policy, server, delivery):
    deliver(delivery, policy)
    server.start("b")
    server.workers[1].constants = "6"
    with pytest.raises(ValueError, match="other buffers than before"):
        deliver(delivery, policy)


@pytest.mark.parametrize("name, value", [("rms_norm_eps", 1e-3), ("rope_parameters", {"rope_theta": 5.0})])
def test_a_server_of_a_model_with_other_numbers_is_refused_by_name(name, value, policy, server, tmp_path):
    server.numbers[name] = value
    with pytest.raises(ValueError, match=f"serves another model than the trainer has, in config.json: {name}"):
        StagedEngine(server, policy, recipe_for_model(policy), str(tmp_path), 1)


def test_workers_that_compute_otherwise_than_the_first_one_are_refused(policy, server, tmp_path):
    answers = server.rpc("fp8_describe")
    answers[1]["query_rounded"] = True
    server.rpc = lambda method, *args: answers
    with pytest.raises(
        RuntimeError, match="worker 1 of http://server differs from the first one: query_rounded False, True"
    ):
        StagedEngine(server, policy, recipe_for_model(policy), str(tmp_path), 1)


def test_a_folder_without_room_is_an_error_that_names_it(policy, server, monkeypatch, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=f"TRL_FP8_TRANSFER='{tmp_path}'.*No space left on device.*with room"):
        StagedEngine(server, policy, recipe_for_model(policy), str(tmp_path), 1)
    assert list(tmp_path.iterdir()) == []


def test_the_staged_file_is_removed_with_its_engine(policy, server, tmp_path):
    engine = StagedEngine(server, policy, recipe_for_model(policy), str(tmp_path), 1)
    assert len(list(tmp_path.iterdir())) == 1
    del engine
    gc.collect()  # engine and layout know each other
    assert list(tmp_path.iterdir()) == []


def test_another_trainers_version_is_refused(policy, server, delivery):
    deliver(delivery, policy)
    for worker in server.workers:
        worker.version = 7
    with pytest.raises(RuntimeError, match=r"holds versions \[7\].*version 1 was sent last"):
        delivery.verify()


def test_a_prefix_cache_that_stays_is_an_error_and_the_server_stays_paused(policy, server, delivery):
    server.resets = False
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        deliver(delivery, policy)
    assert "resume" not in server.calls


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "in the policy and not in the server: model.norm.weight"),
        (lambda tensors: tensors.update(more="bfloat16"), "in the server and not in the policy: more"),
        (lambda tensors: tensors.update({"model.norm.weight": "float8_e4m3fn"}), "FP8 on one side only: model.norm"),
        (lambda tensors: tensors.update({SCALE: "uint8"}), f"1 tensors are scales in another dtype.*{SCALE}"),
    ],
    ids=["lacking", "more", "format", "scales"],
)
def test_a_server_of_another_model_or_recipe_is_refused(policy, server, tmp_path, change, message):
    change(server.tensors)
    with pytest.raises(ValueError, match=f"http://server serves another model.*{message}"):
        StagedEngine(server, policy, recipe_for_model(policy), str(tmp_path), patience=1)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_first_rank_is_raised_on_the_others(policy, tmp_path):
    refused = RuntimeError("no server at http://server")
    with pytest.raises(RuntimeError, match="no server at http://server"):
        StagedEngine(None, policy, recipe_for_model(policy), str(tmp_path), 1, of_first=lambda value: (None, refused))


def test_another_rank_stages_the_same_bytes_and_no_file(policy, server, delivery, engine, tmp_path):
    described = server.rpc("fp8_describe")[0]
    del described["instance"]
    of_first_rank = iter([described, None, (0.5, 1)])  # what it describes, stages, and measures
    other = StagedEngine(
        None, policy, recipe_for_model(policy), str(tmp_path), 1, of_first=lambda value: (next(of_first_rank), None)
    )
    second = InPlaceDelivery(other, policy, recipe_for_model(policy), carried=SomeScales(other.kv_scales(), 2))
    deliver(delivery, policy)
    deliver(second, policy)
    assert torch.equal(other.layout.sums(), engine.layout.sums())
    assert len(list(tmp_path.iterdir())) == 1
    assert (other.pause_seconds, other.version) == (0.5, 1)
    assert isinstance(other.scales.value, KVScales)
