"""Deliveries to a server: what its workers have to answer, and what is refused. The server is an object here."""

import copy
import gc
import os
from contextlib import nullcontext

import pytest
import torch

from testing import tiny_models
from testing.engines import perturb, some_scales
from testing.fake_server import Server
from testing.staged_trainer import SomeScales
from trl_fp8.engine.vllm_server.staged_engine import StagedEngine
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.delivery import InPlaceDelivery, TensorGroup
from trl_fp8.sync.weight_stream import weight_stream


SCALE = "model.layers.0.mlp.down_proj.weight_scale_inv"
NORM = "model.norm.weight"
PUSH = ["pause", "start", "update", "finish", "fp8_state"]


@pytest.fixture
def policy():
    return tiny_models.build()


@pytest.fixture
def server(policy):
    return Server(policy, recipe_for_model(policy))


@pytest.fixture
def engine(policy, server, tmp_path):
    return StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), patience=1)


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


def test_what_is_staged_once_arrives_with_the_first_sync_and_is_audited_with_each(policy, server, engine):
    name, writes = "model.norm.weight", []

    def frozen_tensors():
        writes.append(name)
        return nullcontext([(name, policy.get_parameter(name))])

    def trained_tensors():
        return nullcontext(each for each in policy.named_parameters() if each[0] != name)

    frozen = TensorGroup(engine.layout.part({name}), frozen_tensors)
    delivery = InPlaceDelivery(engine, policy, recipe_for_model(policy), frozen=[frozen], staged=True)
    for _ in range(2):
        report = delivery.deliver(trained_tensors)
        delivery.verify()
        assert report.audited_tensors == len(server.tensors)
        assert all(torch.equal(worker.tensors[name], engine.layout.held[name]) for worker in server.workers)
    assert writes == [name] and server.calls.count("update") == 2 and engine.layout.held[name].any()
    assert report.bytes_sent == sum(held.nbytes for held in engine.layout.held.values()) - frozen.bytes

    # The policy computes with what is staged: it has to stay as it was
    engine.layout.held[name].mul_(2)
    with pytest.raises(RuntimeError, match=f"1 tensors of the engine have changed since the last sync: {name}"):
        delivery.verify()
    delivery.deliver(trained_tensors)
    assert writes == [name, name]

    # And so do the workers' copies, which no later sync writes
    server.workers[1].tensors[name].mul_(2)
    server.workers[1].parts[name] = server.workers[1].arrived[name] = digest(server.workers[1].tensors[name]).item()
    with pytest.raises(RuntimeError, match=f"1 tensors hold other bytes than were sent: {name}"):
        delivery.deliver(trained_tensors)


def test_the_file_is_brought_up_to_date_before_the_pause(policy, server, engine, delivery, monkeypatch):
    for step in (1, 2):
        perturb(policy, step)
        deliver(delivery, policy)
        for worker in server.workers:
            assert worker.tensors.keys() == engine.layout.held.keys()
            assert all(torch.equal(worker.tensors[name], held) for name, held in engine.layout.held.items())
    perturb(policy, 3)
    # The server would go on with the second policy
    monkeypatch.setattr(engine, "_bring_file_up_to_date", lambda base: None)
    with pytest.raises(RuntimeError, match="weight sync failed its audit: .* hold other bytes than were sent"):
        deliver(delivery, policy)


def test_a_server_is_connected_once_and_paused_until_the_audit_has_passed(policy, server, delivery):
    deliver(delivery, policy)
    start = ["wait_until_up", "fp8_describe", "fp8_sees"]
    connect = ["wait_until_up", "fp8_instance", *start, "init", "fp8_state"]
    assert server.calls == [*start, *connect, *PUSH, "reset", "resume"]
    server.calls.clear()
    deliver(delivery, policy)
    assert server.calls == ["wait_until_up", "fp8_instance", *PUSH, "reset", "resume"]


def test_a_trainer_sends_versions_that_no_earlier_trainer_of_the_server_has_sent(policy, server, delivery, tmp_path):
    deliver(delivery, policy)
    deliver(delivery, policy)
    server.start_weight_update()  # and dies
    engine = StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), patience=1)
    following = InPlaceDelivery(engine, policy, recipe_for_model(policy), carried=SomeScales(engine.kv_scales(), 2))
    for version in (3, 4):
        deliver(following, policy)
        following.verify()
        assert engine.version == version and {worker.version for worker in server.workers} == {version}


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


def overwritten(worker):
    worker.tensors[NORM].add_(1)


def misread(worker):
    overwritten(worker)
    worker.parts[NORM] = worker.arrived[NORM] = digest(worker.tensors[NORM]).item()


def never_received(worker):
    for known in (worker.tensors, worker.parts, worker.arrived):
        known.pop(NORM, None)


@pytest.mark.parametrize("damage", [overwritten, misread, never_received])
def test_zeros_that_one_worker_does_not_hold_are_found_although_their_checksum_is_zero(
    damage, policy, server, engine, delivery
):
    policy.get_parameter(NORM).data.zero_()
    deliver(delivery, policy)
    assert not digest(engine.layout.held[NORM])
    worker = server.workers[1]
    damage(worker)
    with pytest.raises(RuntimeError, match=f"1 tensors of the engine have changed since the last sync: {NORM}"):
        delivery.verify()
    read = worker.read

    def damaged(update):
        read(update)
        damage(worker)

    worker.read = damaged
    with pytest.raises(RuntimeError, match=f"1 tensors hold other bytes than were sent: {NORM}"):
        deliver(delivery, policy)


def test_no_checksum_matches_if_the_server_cannot_be_asked(policy, server, engine, delivery):
    policy.get_parameter(NORM).data.zero_()
    deliver(delivery, policy)
    server.fail = {"fp8_state": RuntimeError("gone")}
    assert not (engine.layout.sums() == torch.tensor(engine.layout.staged_sums())).any()


def test_a_worker_that_read_another_trainers_file_fails_the_audit(policy, server, delivery, tmp_path):
    other = copy.deepcopy(policy)
    perturb(other, 9)
    staged = StagedEngine([Server(other, recipe_for_model(other))], other, recipe_for_model(other), str(tmp_path), 1)
    deliver(InPlaceDelivery(staged, other, recipe_for_model(other)), other)
    read = server.workers[0].read

    def foreign(update):
        read(update | {"whole": {"file": staged._file.path}})

    server.workers[0].read = foreign
    with pytest.raises(RuntimeError, match="hold other bytes than were sent"):
        deliver(delivery, policy)


def test_another_cache_than_the_trainers_is_refused_at_the_start(policy, server, tmp_path):
    with pytest.raises(ValueError, match=r"FP8 KV cache in the layers \[0, 1\].*flags say \[\]"):
        StagedEngine([server], policy, recipe_for_model(policy, kv_cache_dtype="auto"), str(tmp_path), 1)
    server.fp8_cache = [1]
    with pytest.raises(ValueError, match=r"FP8 KV cache in the layers \[1\].*flags say \[0, 1\]"):
        StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), 1)


def test_layers_that_nothing_in_the_trainer_asks_for_are_refused_at_the_start(policy, server, tmp_path):
    server.changed = {"added": {"model.layers.0.self_attn.q_proj": [4, 0, 3, [128, 128], 4]}}
    with pytest.raises(
        ValueError, match="layers that no flag of the trainer asks for, at model.layers.0.*without --lora"
    ):
        StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), 1)


def test_another_format_of_scales_than_the_trainers_is_refused_at_the_start(policy, server, tmp_path):
    recipe = recipe_for_model(policy, scale_format="fp32")
    message = r"fp8_scale_format='fp32', but http://server was started with --scale-format pow2.*--scale-format fp32"
    with pytest.raises(ValueError, match=message):
        StagedEngine([server], policy, recipe, str(tmp_path), 1)
    server.scale_format = "fp32"
    StagedEngine([server], policy, recipe, str(tmp_path), 1)


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
    server.workers[1].read = read
    deliver(delivery, policy)
    server.workers[1].wrong_scales = "a copy of layer 0 is 1.0"
    with pytest.raises(RuntimeError, match="worker 1 of http://server: a copy of layer 0 is 1.0"):
        delivery.verify()


def test_buffers_and_derived_tensors_that_change_after_a_sync_stop_a_generation(policy, server, tmp_path):
    server.changed = {"derived": ["absorbed"]}
    recipe = recipe_for_model(policy)
    delivery = InPlaceDelivery(StagedEngine([server], policy, recipe, str(tmp_path), 1), policy, recipe)
    deliver(delivery, policy)
    server.workers[1].constants = "6"
    with pytest.raises(RuntimeError, match="http://server: buffers that no sync writes have changed"):
        delivery.verify()
    server.workers[1].constants = "5"
    deliver(delivery, policy)
    server.workers[1].tensors["absorbed"] = torch.ones(1)
    server.workers[1].parts["absorbed"] = 0
    with pytest.raises(RuntimeError, match="http://server: tensors that the engine derives have changed: absorbed"):
        delivery.verify()


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
        StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), 1)


def test_workers_that_compute_otherwise_than_the_first_one_are_refused(policy, server, tmp_path):
    answers = server.rpc("fp8_describe")
    answers[1]["query_rounded"] = True
    server.rpc = lambda method, *args: answers
    with pytest.raises(
        RuntimeError, match="worker 1 of http://server differs from the first one: query_rounded False, True"
    ):
        StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), 1)


def test_a_folder_without_room_is_an_error_that_names_it(policy, server, monkeypatch, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=f"TRL_FP8_TRANSFER='{tmp_path}'.*No space left on device.*with room"):
        StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), 1)
    assert list(tmp_path.iterdir()) == []


def test_the_staged_file_is_removed_with_its_engine(policy, server, tmp_path):
    engine = StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), 1)
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
        StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), patience=1)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_first_rank_is_raised_on_the_others(policy, tmp_path):
    refused = RuntimeError("no server at http://server")
    with pytest.raises(RuntimeError, match="no server at http://server"):
        StagedEngine([], policy, recipe_for_model(policy), str(tmp_path), 1, of_first=lambda value: (None, refused))


def test_another_rank_stages_the_same_bytes_and_no_file(policy, server, delivery, engine, tmp_path):
    described = server.rpc("fp8_describe")[0]
    del described["instance"]
    of_first_rank = iter([described, None, (0.5, 1, 1.0, 1)])  # what it describes, stages, and measures
    other = StagedEngine(
        [], policy, recipe_for_model(policy), str(tmp_path), 1, of_first=lambda value: (next(of_first_rank), None)
    )
    second = InPlaceDelivery(other, policy, recipe_for_model(policy), carried=SomeScales(other.kv_scales(), 2))
    deliver(delivery, policy)
    deliver(second, policy)
    assert torch.equal(other.layout.sums(), engine.layout.sums())
    assert len(list(tmp_path.iterdir())) == 1
    assert (other.pause_seconds, other.version) == (0.5, 1)
    assert isinstance(other.scales.value, KVScales)


@pytest.mark.parametrize("transport", ["auto", "broadcast", "cuda_ipc"])
def test_another_way_of_patches_is_reported_whatever_brings_whole_policies(
    transport, policy, server, tmp_path, caplog
):
    engine = StagedEngine([server], policy, recipe_for_model(policy), str(tmp_path), 1, transport=transport)
    [link] = engine.servers
    push = engine.next_push()
    for sees, messages in ((True, 0), (False, 1), (False, 1), (True, 2)):
        server.sees = sees
        link.choose_transport(push.file, push.staged)
        assert caplog.text.count("Weights travel to http://server by") == messages
