"""What a server does when something goes wrong: real processes, one forked server."""

import copy
import gc
import hashlib
import itertools
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from vllm.v1.engine.async_llm import AsyncLLM

from testing import forked_server
from testing.staged_trainer import StagedTrainer, with_changed_patch
from trl_fp8.engine.vllm_server import broadcast, guard, plugin, transports
from trl_fp8.engine.vllm_server.client import Control, ServerGone
from trl_fp8.engine.vllm_server.staging import StagingFile
from trl_fp8.sync.pieces import Piece


pytestmark = pytest.mark.engine
WAIT = 3.0  # seconds that the server lets requests wait
PROMPT = [4, 5, 6, 7]


def fault(folder: str) -> Path:
    """Return the file whose existence makes a worker fail in the middle of an update."""
    return Path(folder).parent / "fault"


def no_pause(folder: str) -> Path:
    """Return the file whose existence makes vLLM's own pause do nothing, so that only the guard holds requests."""
    return Path(folder).parent / "no_pause"


def plant_faults(folder: str):
    """Return what makes workers fail in the middle of a policy, or vLLM not pause, while the files above exist."""

    def plant() -> None:
        plugin.register()  # vLLM may call it more than once
        of_sent, pause = Piece.of_sent, AsyncLLM.pause_generation

        def failing(self, tensor: torch.Tensor) -> torch.Tensor:
            if fault(folder).exists() and self.name == "model.norm.weight":
                raise OSError("planted")
            return of_sent(self, tensor)

        async def pause_generation(self, **options) -> None:
            if not no_pause(folder).exists():
                await pause(self, **options)

        Piece.of_sent, AsyncLLM.pause_generation = failing, pause_generation

    return plant


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "staged"
    with forked_server.running(checkpoint("qwen3"), folder, wait=WAIT, plant=plant_faults(str(folder))) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(server):
    return StagedTrainer(server, seed=1)


@pytest.fixture(scope="module")
def broadcaster(server, trainer, tmp_path_factory):
    """Return a trainer of the same policy, which it broadcasts. Its files the server does not see."""
    return StagedTrainer(server, seed=1, folder=str(tmp_path_factory.mktemp("far")), transport="broadcast")


def processes(group: int) -> list[int]:
    """Return the processes of a group."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in found if group_of(pid) == group]


def group_of(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def target_of(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def ask(server, timeout: float = 120) -> httpx.Response:
    body = {"model": server.model, "prompt": [PROMPT], "max_tokens": 4, "temperature": 0.0, "logprobs": 1}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout)


def log_probs(server) -> list[float]:
    answer = ask(server)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


def test_nothing_is_sampled_before_the_first_policy(server):
    answer = ask(server)
    assert answer.status_code == 503
    assert "no complete policy for 3 seconds" in answer.text


@pytest.mark.parametrize(
    "path",
    [
        *("start_weight_update", "collective_rpc", "resume", "pause?mode=keep", "reset_prefix_cache"),
        "fp8_upload?kind=whole&offset=0&size=4",
    ],
)
def test_a_stranger_changes_nothing(server, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.post(f"{server.url}/{path}", json={"method": "fp8_begin", "args": [1]}, headers=headers)
        assert answer.status_code == 401
    with pytest.raises(ValueError, match="TRL_FP8_TOKEN"):
        server.control("wrong").resume()


@pytest.mark.parametrize("query", ["", "mode=abort", "mode=keep&clear_cache=false", "clear_cache=false&mode=keep"])
def test_pause_without_keep_is_refused(server, query):
    headers = {"Authorization": f"Bearer {server.token}"}
    assert httpx.post(f"{server.url}/pause?{query}", headers=headers).status_code == 400


def test_unknown_endpoints_and_large_bodies_are_refused(server):
    headers = {"Authorization": f"Bearer {server.token}"}
    assert httpx.post(f"{server.url}/sleep", headers=headers).status_code == 404
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", headers=headers, json={}).status_code == 404
    large = (b" " * 2**20 for _ in range(65))  # without a content-length
    assert httpx.post(f"{server.url}/tokenize", content=large, timeout=30).status_code == 413


def test_a_sync_arrives_and_requests_are_served(server, trainer):
    trainer.sync()
    assert log_probs(server) == log_probs(server)


def test_requests_wait_for_the_audit(server, trainer):
    """In a server whose vLLM does not pause: it would hold them, too."""
    trainer.sync()
    no_pause(server.folder).touch()
    try:
        trainer.server.begin()
        trainer.push()
        assert ask(server).status_code == 503
        trainer.engine.reset_prefix_cache()
        assert ask(server).status_code == 200
    finally:
        no_pause(server.folder).unlink()


def test_a_trainer_that_dies_in_an_update_leaves_a_server_for_the_next(server, trainer):
    trainer.sync()
    before = log_probs(server)
    trainer.server.begin()  # and dies
    assert [state["version"] for state in trainer.control.rpc("fp8_state")] == [-1]
    assert ask(server).status_code == 503
    with pytest.raises(RuntimeError, match="409.*does not follow an update that is open"):
        trainer.control.resume()
    trainer.sync()
    assert log_probs(server) == before


def metric(server, name: str) -> float:
    """Return the sum of a metric over the labels that `name` contains."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    name, _, label = name.partition(" ")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and label in line)


def unfinished(server) -> float:
    return metric(server, "vllm:num_requests_running") + metric(server, "vllm:num_requests_waiting")


def test_a_request_that_vllm_holds_is_gone_when_its_update_is_abandoned(server, trainer):
    # 32 completions, of which vLLM computes 8 at a time: time enough to begin an update
    body = {"model": server.model, "prompt": [PROMPT], "max_tokens": 56, "ignore_eos": True, "n": 32}
    url = f"{server.url}/v1/completions"
    answers = []
    for _ in range(20):  # until an update begins while vLLM computes
        trainer.sync()
        before = metric(server, 'vllm:request_success_total "length"')
        answers.clear()
        asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60)))
        asking.start()
        while not unfinished(server) and asking.is_alive():
            pass
        trainer.server.begin()  # and dies
        asking.join(30)
        assert answers, "the request waits for a trainer that is gone"
        if answers[0].status_code == 503:
            break
    assert answers[0].status_code == 503
    trainer.sync()
    assert ask(server).status_code == 200
    finished = metric(server, 'vllm:request_success_total "length"') - before - 1  # of the request's completions
    assert finished < body["n"], "vLLM went on with the request"
    assert unfinished(server) == 0


def test_an_update_is_of_one_trainer_from_pause_to_resume(server, trainer):
    trainer.sync()
    second = StagedTrainer(server, seed=7)
    second.server.connect(second.engine.next_push(), 0)
    trainer.server.begin()
    second.server.begin()  # as after the death of the first
    for call in (
        trainer.control.start_weight_update,
        lambda: trainer.control.update_weights({}),
        lambda: trainer.control.finish_weight_update("1"),
        trainer.control.resume,
    ):
        with pytest.raises(RuntimeError, match="409.*another trainer has paused this server"):
            call()
    second.push()
    with pytest.raises(RuntimeError, match="409.*another trainer"):
        trainer.control.resume()
    second.engine.reset_prefix_cache()
    assert ask(server).status_code == 200


def test_calls_without_an_open_update_are_refused_before_a_worker_raises(server, trainer):
    trainer.sync()
    for call in (
        trainer.control.start_weight_update,
        lambda: trainer.control.update_weights({}),
        lambda: trainer.control.finish_weight_update("1"),
    ):
        with pytest.raises(RuntimeError, match="409.*does not follow an update that is none"):
            call()
    trainer.delivery.verify()
    trainer.server.begin()
    with pytest.raises(RuntimeError, match="409.*/start_weight_update does not follow an update that is open"):
        trainer.control.start_weight_update()
    trainer.sync()


@pytest.mark.parametrize("transport", ["auto", "broadcast"])
def test_a_worker_that_fails_says_so_and_the_next_sync_is_whole(transport, server, trainer, broadcaster):
    trainer = trainer if transport == "auto" else broadcaster
    trainer.sync()
    before = log_probs(server)
    trainer.server.proven = None  # the file is read for a whole policy
    fault(server.folder).touch()
    try:
        with pytest.raises(RuntimeError, match="worker 0: OSError: planted"):
            trainer.sync()
    finally:
        fault(server.folder).unlink()
    with pytest.raises(RuntimeError, match="no complete policy"):
        trainer.delivery.verify()
    assert ask(server).status_code == 503
    trainer.sync()
    assert log_probs(server) == before


PATCHES = {  # what becomes of a patch on its way, what the trainer says, and the versions that it sends
    "arrives": (lambda update: [update], "", 1),
    "repeated": (lambda update: [update, update], "", 1),
    "lost": (lambda update: [], "holds versions", 2),
    "reordered": (
        lambda update: [update | {"patch": update["patch"] | {"base": update["version"] - 2}}],
        r"RuntimeError: the patch changes version \d+, and this worker holds version \d+",
        2,
    ),
    "truncated": (with_changed_patch(lambda body: body[:-1]), r"ValueError: .* has \d+ bytes instead of \d+", 2),
    "tampered": (
        with_changed_patch(lambda body: body[:-1] + bytes([body[-1] ^ 1])),
        "ValueError: the patch does not have",
        2,
    ),
}


@pytest.mark.parametrize("change, message, pushes", PATCHES.values(), ids=PATCHES)
def test_whatever_becomes_of_a_patch_the_server_is_whole_after_the_sync(
    change, message, pushes, server, trainer, monkeypatch, caplog
):
    trainer.sync()
    version = trainer.engine.version
    update_weights = trainer.control.update_weights

    def on_its_way(update):
        for each in change(update) if "patch" in update else [update]:
            update_weights(each)

    monkeypatch.setattr(trainer.control, "update_weights", on_its_way)
    trainer.step()
    trainer.sync()
    assert re.search(message, caplog.text), caplog.text
    assert trainer.engine.version == version + pushes and (trainer.server.patch is None) == (pushes == 2)
    found = log_probs(server)
    monkeypatch.undo()
    trainer.server.proven = None  # all of it again
    trainer.sync()
    assert trainer.server.patch is None and log_probs(server) == found


def test_a_patch_of_a_trainer_with_a_checksum_of_its_own_fails_the_audit(server, trainer, monkeypatch):
    trainer.sync()
    update_weights = trainer.control.update_weights

    def on_its_way(update):
        with_changed_patch(lambda body: body[:-1] + bytes([body[-1] ^ 1]))(update)
        body = Path(update["patch"]["file"]).read_bytes()
        update_weights(update | {"patch": update["patch"] | {"sha256": hashlib.sha256(body).hexdigest()}})

    monkeypatch.setattr(trainer.control, "update_weights", on_its_way)
    trainer.step()
    with pytest.raises(RuntimeError, match="1 tensors hold other bytes than were sent"):
        trainer.sync()
    monkeypatch.undo()
    assert ask(server).status_code == 503
    trainer.sync()
    assert trainer.server.patch is None and ask(server).status_code == 200


CHUNKS = {  # what becomes of the second chunk of all on its way, and what the trainer says
    "repeated": (lambda *chunk: [chunk, chunk], "409.*a chunk at byte 50000 does not continue"),
    "lost": (lambda *chunk: [], "409.*a chunk at byte 100000 does not continue"),
}


@pytest.mark.parametrize("change, message", CHUNKS.values(), ids=CHUNKS)
def test_a_trainer_whose_files_the_server_does_not_see_sends_them_in_http_bodies(
    change, message, server, trainer, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(transports, "MAX_CHUNK_BYTES", 50_000)
    trainer.sync()
    found = log_probs(server)
    far = StagedTrainer(server, seed=1, folder=str(tmp_path))
    far.model.load_state_dict(trainer.model.state_dict())
    assert far.server.transport.name.startswith("HTTP bodies, because")
    upload, count = far.control.upload, itertools.count(1)

    def on_its_way(*chunk):
        path = ""
        for each in change(*chunk) if next(count) == 2 else [chunk]:
            path = upload(*each)
        return path

    monkeypatch.setattr(far.control, "upload", on_its_way)
    far.sync()
    assert next(count) > 5 and re.search(message, caplog.text), caplog.text
    assert log_probs(server) == found
    far.step()
    far.sync()
    assert far.server.patch is not None
    found = log_probs(server)
    far.server.proven = None  # all of it again
    far.sync()
    assert far.server.patch is None and log_probs(server) == found
    assert len(list(Path(server.folder).glob("trl_fp8_*"))) == 2  # that of `trainer`, and all of this one's policy
    trainer.sync()
    assert len(list(Path(server.folder).glob("trl_fp8_*"))) == 1


def test_broadcasts_bring_what_files_bring(server, trainer, broadcaster, monkeypatch):
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 20_000)  # less than the largest tensor
    sizes = [held.nbytes for held in broadcaster.engine.layout.held.values()]
    assert 20_000 < max(sizes) < sum(sizes) / 5
    policies, found = [], {}
    for _ in range(2):
        trainer.step(1e-2)  # too much for a patch
        policies.append(copy.deepcopy(trainer.model.state_dict()))
    for each in (trainer, broadcaster):
        found[each] = []
        for policy in policies:
            each.model.load_state_dict(policy)
            each.sync()
            assert each.server.patch is None
            found[each].append((each.control.rpc("fp8_state")[0]["arrived"], log_probs(server)))
    assert found[broadcaster] == found[trainer] and found[trainer][0] != found[trainer][1]
    broadcaster.step()
    broadcaster.sync()
    assert broadcaster.server.patch is not None and log_probs(server) != found[trainer][1][1]


def test_an_update_that_a_server_refuses_does_not_hang_its_trainer(server, trainer, broadcaster):
    broadcaster.sync()
    broadcaster.server.distrust()
    start = time.monotonic()
    push = broadcaster.engine.next_push()
    broadcaster.server.connect(push, 0)
    trainer.server.begin()  # another trainer takes the server
    broadcaster.server.patch = None
    with pytest.raises(RuntimeError, match="409.*another trainer"), broadcaster.server.sent(push) as sent:
        broadcaster.server.push(push, sent)
    assert time.monotonic() - start < 10
    trainer.sync()


def test_foreign_files_are_not_read(server, trainer, tmp_path):
    elsewhere = StagingFile(str(tmp_path), {"a": ("float32", [1])})
    link = Path(server.folder) / "link"
    link.symlink_to("/etc/hostname")
    outside = {"file": elsewhere.path}
    trainer.control.init_weight_transfer_engine({"trainer": "a", "table": elsewhere.table})
    for refused in (outside, {"file": str(link)}, {"file": 3}, {"unknown": 1}, {"broadcast": {}}, {}, None):
        trainer.server.begin()
        trainer.control.update_weights({"trainer": "a", "version": 10**6, "whole": refused})
        [state] = trainer.control.rpc("fp8_state")
        assert state["error"], refused
        if refused is outside:
            assert "the only folder that this server reads" in state["error"]
    for refused in ({"trainer": "a"}, {"unknown": 1}):
        trainer.control.init_weight_transfer_engine(refused)
        [state] = trainer.control.rpc("fp8_state")
        assert state["error"], refused
    link.unlink()
    trainer.sync()
    trainer.delivery.verify()


def test_two_trainers_at_one_server_notice_each_other(server, trainer):
    second = StagedTrainer(server, seed=7)
    trainer.sync()
    first_log_probs = log_probs(server)
    second.sync()
    assert log_probs(server) != first_log_probs
    with pytest.raises(RuntimeError):
        trainer.delivery.verify()
    with pytest.raises(RuntimeError, match="another trainer has connected"):
        trainer.engine.arrive()
    trainer.sync()  # it has connected anew
    with pytest.raises(RuntimeError):
        second.delivery.verify()
    assert log_probs(server) == first_log_probs


def test_the_memory_of_a_dead_trainers_file_is_free(server):
    def staged_files() -> list[str]:
        links = [link for pid in processes(server.pid) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return [target for target in map(target_of, links) if f"{server.folder}/" in target]

    StagedTrainer(server, seed=3).sync()
    gc.collect()
    assert not staged_files()


def test_answers_of_other_questions_are_noticed(server, trainer):
    control = server.control()
    control._post = lambda path, json: {"results": [{"number": json["args"][0] - 1, "instance": "x"}]}
    with pytest.raises(RuntimeError, match="answers another question"):
        control.rpc("fp8_instance")
    with pytest.raises(RuntimeError, match="fp8_describe: TypeError"):
        trainer.control.rpc("fp8_describe", 1, 2)


def test_a_server_that_is_killed_in_a_broadcast_and_started_again_takes_the_next_sync(
    server, broadcaster, monkeypatch
):
    """Last: the module's server is another process afterwards."""
    broadcaster.sync()
    before = log_probs(server)
    broadcaster.server.distrust()
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 20_000)
    send, sent = broadcast.GlooGroup.broadcast, itertools.count(1)

    def killing(group, tensor):
        if next(sent) == 3:
            os.killpg(server.pid, signal.SIGKILL)
        send(group, tensor)

    monkeypatch.setattr(broadcast.GlooGroup, "broadcast", killing)
    start = time.monotonic()
    with pytest.raises(ServerGone, match="does not answer /update_weights"):
        broadcaster.engine.arrive()
    assert time.monotonic() - start < 20 and next(sent) > 3
    monkeypatch.undo()
    server.end(signal.SIGKILL)
    again = forked_server.start(server.model, Path(server.folder), wait=WAIT, port=server.port)
    server.pid = again.pid
    assert ask(server).status_code == 503
    broadcaster.sync()
    assert log_probs(server) == before


def test_no_server_is_an_error_that_says_how_to_start_one():
    with pytest.raises(ServerGone, match="trl-fp8 serve"):
        Control("http://127.0.0.1:9", token="").wait_until_up(0)


def test_an_engine_that_hangs_behind_a_healthy_server_is_named(checkpoint, tmp_path):
    def plant() -> None:
        guard.ENGINE_SECONDS = 10.0  # longer than an answer takes on a busy host

    with forked_server.running(checkpoint("qwen3"), tmp_path / "staged", plant=plant) as server:
        StagedTrainer(server, seed=1).sync()
        assert ask(server).status_code == 200
        engine = [pid for pid in processes(server.pid) if pid != server.pid]
        for pid in engine:
            os.kill(pid, signal.SIGSTOP)
        assert httpx.get(f"{server.url}/health").status_code == 200
        answer = ask(server)
        assert answer.status_code == 504 and "it hangs, although /health answers. Look at the log" in answer.text
        control = Control(server.url, timeout=0.5, token=server.token)
        with pytest.raises(ServerGone, match=rf"{server.url} has not answered /collective_rpc for 0.5 seconds.*hangs"):
            control.rpc("fp8_instance")
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
        assert ask(server).status_code == 200
