"""What a server does when something goes wrong: real processes, one forked server."""

import gc
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from vllm.v1.engine.async_llm import AsyncLLM

from testing import forked_server
from testing.staged_trainer import StagedTrainer
from trl_fp8.engine.vllm_server import plugin
from trl_fp8.engine.vllm_server.client import Control, ServerGone
from trl_fp8.engine.vllm_server.staging import StagedTensors, StagingFile


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
    """Return what makes workers fail at the 20th tensor, or vLLM not pause, while the files above exist."""

    def plant() -> None:
        plugin.register()  # vLLM may call it more than once
        read, pause = StagedTensors.__getitem__, AsyncLLM.pause_generation

        def failing(self, name: str) -> torch.Tensor:
            if fault(folder).exists() and list(self).index(name) == 20:
                raise OSError("planted")
            return read(self, name)

        async def pause_generation(self, **options) -> None:
            if not no_pause(folder).exists():
                await pause(self, **options)

        StagedTensors.__getitem__, AsyncLLM.pause_generation = failing, pause_generation

    return plant


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "staged"
    with forked_server.running(checkpoint("qwen3"), folder, wait=WAIT, plant=plant_faults(str(folder))) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(server):
    return StagedTrainer(server, seed=1)


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


def ask(server, timeout: float = 30) -> httpx.Response:
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
    "path", ["start_weight_update", "collective_rpc", "resume", "pause?mode=keep", "reset_prefix_cache"]
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
        trainer.engine.begin()
        trainer.engine.push()
        assert ask(server).status_code == 503
        trainer.engine.reset_prefix_cache()
        assert ask(server).status_code == 200
    finally:
        no_pause(server.folder).unlink()


def test_a_trainer_that_dies_in_an_update_leaves_a_server_for_the_next(server, trainer):
    trainer.sync()
    before = log_probs(server)
    trainer.engine.begin()  # and dies
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
        answers.clear()
        asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60)))
        asking.start()
        while not unfinished(server) and asking.is_alive():
            pass
        finished = metric(server, 'vllm:request_success_total "length"')
        trainer.engine.begin()  # and dies
        asking.join(30)
        assert answers, "the request waits for a trainer that is gone"
        if answers[0].status_code == 503:
            break
    assert answers[0].status_code == 503
    trainer.sync()
    assert ask(server).status_code == 200
    assert metric(server, 'vllm:request_success_total "length"') == finished + 1, "vLLM went on with the request"
    assert unfinished(server) == 0


def test_an_update_is_of_one_trainer_from_pause_to_resume(server, trainer):
    trainer.sync()
    second = StagedTrainer(server, seed=7)
    second.engine._connect()
    trainer.engine.begin()
    second.engine.begin()  # as after the death of the first
    for call in (
        trainer.control.start_weight_update,
        lambda: trainer.control.update_weights({}),
        lambda: trainer.control.finish_weight_update("1"),
        trainer.control.resume,
    ):
        with pytest.raises(RuntimeError, match="409.*another trainer has paused this server"):
            call()
    second.engine.push()
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
    trainer.engine.begin()
    with pytest.raises(RuntimeError, match="409.*/start_weight_update does not follow an update that is open"):
        trainer.control.start_weight_update()
    trainer.sync()


def test_a_worker_that_fails_says_so_and_the_next_sync_is_whole(server, trainer):
    trainer.sync()
    before = log_probs(server)
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


def test_foreign_files_are_not_read(server, trainer, tmp_path):
    elsewhere = StagingFile(str(tmp_path), {"a": ("float32", [1])})
    link = Path(server.folder) / "link"
    link.symlink_to("/etc/hostname")
    outside = {"path": elsewhere.path, "table": elsewhere.table}
    for refused in (outside, {"path": str(link), "table": {}}, {"path": 3}, {"unknown": 1}):
        trainer.control.init_weight_transfer_engine(refused)
        [state] = trainer.control.rpc("fp8_state")
        assert state["error"], refused
        if refused is outside:
            assert "the only folder that this server reads" in state["error"]
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


def test_a_server_that_is_killed_and_started_again_takes_the_next_sync(server, trainer):
    """Last: the module's server is another process afterwards."""
    trainer.sync()
    before = log_probs(server)
    trainer.engine.begin()
    server.end(signal.SIGKILL)
    with pytest.raises(ServerGone, match="does not answer /update_weights"):
        trainer.engine.push()
    again = forked_server.start(server.model, Path(server.folder), wait=WAIT, port=server.port)
    server.pid = again.pid
    assert ask(server).status_code == 503
    trainer.sync()
    assert log_probs(server) == before


def test_no_server_is_an_error_that_says_how_to_start_one():
    with pytest.raises(ServerGone, match="trl-fp8 serve"):
        Control("http://127.0.0.1:9", token="").wait_until_up(0)
