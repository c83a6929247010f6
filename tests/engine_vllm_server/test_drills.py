"""What a server does when something goes wrong: real processes, one forked server."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from testing import forked_server
from testing.engines import perturb, some_scales
from trl_fp8.engine.vllm_server.client import Control, ServerGone
from trl_fp8.engine.vllm_server.receiver import Receiver
from trl_fp8.engine.vllm_server.staging import StagingFile
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.weight_stream import weight_stream


pytestmark = pytest.mark.engine
WAIT = 3.0  # seconds that the server lets requests wait
PROMPT = [4, 5, 6, 7]


class Trainer:
    """The trainer's half of a sync, call by call."""

    def __init__(self, server: forked_server.ForkedServer, seed: int):
        self.control = server.control()
        model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
        perturb(model, seed)
        recipe = recipe_for_model(model)
        sent = dict(weight_stream(model.named_parameters(), recipe))
        [described] = self.control.rpc("fp8_describe", sorted(recipe.linears), [])
        assert set(described["tensors"]) == set(sent)
        dtypes = described["tensors"]
        self.staged = StagingFile(server.folder, {name: (dtypes[name], list(sent[name].shape)) for name in sent})
        for name, tensor in sent.items():
            self.staged.tensors[name].copy_(tensor)
        self.scales = some_scales(2, seed).values.tolist()
        self.version = 0
        self.connect()

    def connect(self, **changes) -> None:
        whole = {"path": self.staged.path, "table": self.staged.table, "kv_layers": [0, 1], "skip_layers": []}
        self.control.init_weight_transfer_engine(whole | changes)

    def begin(self) -> None:
        self.control.pause()
        self.control.rpc("fp8_begin")
        self.control.start_weight_update()

    def write(self) -> None:
        self.version += 1
        self.control.update_weights({"path": self.staged.path, "version": self.version, "kv_scales": self.scales})
        self.control.finish_weight_update(weight_version=str(self.version))

    def state(self) -> dict:
        [state] = self.control.rpc("fp8_state")
        return state

    def holds_mine(self) -> bool:
        """Return whether the server holds what this trainer staged, as a trainer's audit decides it."""
        state = self.state()
        sums = {name: str(int(digest(tensor))) for name, tensor in self.staged.tensors.items()}
        scales_arrived = state["kv_scales"] == self.scales and not state["kv_wrong"]
        written = not state["error"] and state["version"] == self.version
        return written and state["arrived"] == sums and not state["differ"] and scales_arrived

    def sync(self) -> None:
        self.connect()
        self.begin()
        self.write()
        assert self.holds_mine(), self.state()["error"]
        assert self.control.reset_prefix_cache()
        self.control.resume()


def fault(folder: str) -> Path:
    """Return the file whose existence makes a worker fail in the middle of an update."""
    return Path(folder).parent / "fault"


def plant_fault(path: Path):
    """Return what makes workers fail at the 20th tensor while `path` exists."""

    def plant() -> None:
        read = Receiver._write

        def write(self, **update) -> None:
            if path.exists():
                self._staged = FailingTensors(self._staged)
            read(self, **update)

        Receiver._write = write

    return plant


class FailingTensors:
    def __init__(self, staged):
        self._staged = staged

    def items(self):
        for number, item in enumerate(self._staged.items()):
            if number == 20:
                raise OSError("planted")
            yield item


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "staged"
    with forked_server.running(
        checkpoint("qwen3"), folder, wait=WAIT, plant=plant_fault(fault(str(folder)))
    ) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(server):
    made = Trainer(server, seed=1)
    yield made
    made.staged.remove()


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
    """Without a pause, in which vLLM itself would hold them."""
    trainer.sync()
    trainer.control.rpc("fp8_begin")
    trainer.control.start_weight_update()
    trainer.write()
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(ask(server)))
    waiting.start()
    waiting.join(1)
    assert not answers, "sampled before the trainer compared checksums"
    assert trainer.holds_mine()
    trainer.control.resume()
    waiting.join(30)
    assert answers[0].status_code == 200


def test_a_trainer_that_dies_in_an_update_leaves_a_server_for_the_next(server, trainer):
    trainer.sync()
    before = log_probs(server)
    trainer.begin()  # and dies
    assert ask(server).status_code == 503
    with pytest.raises(RuntimeError, match="409"):
        trainer.control.resume()  # workers hold parts of two policies
    trainer.sync()
    assert log_probs(server) == before


def test_a_request_that_vllm_holds_ends_when_its_update_is_abandoned(server, trainer):
    trainer.sync()
    body = {"model": server.model, "prompt": [PROMPT], "max_tokens": 50, "ignore_eos": True, "n": 8}
    answers = []
    url = f"{server.url}/v1/completions"
    held = threading.Thread(target=lambda: answers.extend(httpx.post(url, json=body, timeout=60) for _ in range(20)))
    held.start()
    time.sleep(0.3)
    trainer.begin()
    held.join(2)
    trainer_died = time.monotonic()
    while len(answers) < 1 or answers[-1].status_code == 200:
        assert time.monotonic() < trainer_died + 30, "a request waits for a trainer that is gone"
        time.sleep(0.1)
    assert answers[-1].status_code == 503
    trainer.sync()
    held.join(60)


def test_a_worker_that_fails_says_so_and_the_next_sync_is_whole(server, trainer):
    trainer.sync()
    before = log_probs(server)
    fault(server.folder).touch()
    try:
        trainer.begin()
        trainer.write()
        assert "planted" in trainer.state()["error"]
        assert trainer.state()["version"] == -1
        assert not trainer.holds_mine()
    finally:
        fault(server.folder).unlink()
    assert ask(server).status_code == 503
    trainer.sync()
    assert log_probs(server) == before


def test_foreign_files_are_not_read(server, trainer, tmp_path):
    trainer.sync()
    elsewhere = StagingFile(str(tmp_path), {"a": ("float32", [1])})
    link = Path(server.folder) / "link"
    link.symlink_to("/etc/hostname")
    trainer.connect(path=elsewhere.path, table=elsewhere.table)
    assert "the only folder that this server reads" in trainer.state()["error"]
    for changes in ({"path": str(link), "table": {}}, {"path": 3}, {"unknown": 1}):
        trainer.connect(**changes)
        assert trainer.state()["error"], changes
    link.unlink()
    elsewhere.remove()
    assert httpx.get(f"{server.url}/health").status_code == 200
    trainer.sync()


def test_two_trainers_at_one_server_notice_each_other(server, trainer):
    second = Trainer(server, seed=7)
    trainer.sync()
    first_log_probs = log_probs(server)
    second.sync()
    assert log_probs(server) != first_log_probs
    assert not trainer.holds_mine()
    trainer.begin()
    trainer.write()  # without connecting anew: the file is another's
    assert "another trainer has connected" in trainer.state()["error"]
    trainer.sync()
    assert not second.holds_mine()
    assert log_probs(server) == first_log_probs
    second.staged.remove()


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
    before, instance = log_probs(server), trainer.state()["instance"]
    trainer.begin()
    server.end(signal.SIGKILL)
    with pytest.raises(ServerGone, match="does not answer /update_weights"):
        trainer.write()
    again = forked_server.start(server.model, Path(server.folder), wait=WAIT, port=server.port)
    server.pid = again.pid
    assert ask(server).status_code == 503
    [described] = trainer.control.rpc(
        "fp8_describe", sorted(recipe_for_model(AutoModelForCausalLM.from_pretrained(server.model)).linears), []
    )
    assert described["instance"] != instance
    trainer.sync()
    assert log_probs(server) == before


def test_a_stock_vllm_with_the_plugin_is_a_stock_vllm(monkeypatch):
    """In a process of its own: registries are the same before and after, and nothing of ours is imported."""
    script = """
import sys
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.v1.attention.backends.registry import AttentionBackendEnum
import vllm.model_executor.kernels.linear as linear
def registries():
    kernels = {kind: list(found) for kind, found in linear._POSSIBLE_FP8_BLOCK_KERNELS.items()}
    return set(WeightTransferEngineFactory._registry), kernels, AttentionBackendEnum.CPU_ATTN.get_path()
before = registries()
from trl_fp8.engine.vllm_server import plugin
plugin.register()
assert registries() == before
assert not {name for name in sys.modules if name.startswith("trl_fp8.engine.vllm.")}
import os
os.environ["TRL_FP8_SERVER"] = "1"
plugin.register()
plugin.register()
assert all(a != b for a, b in zip(registries(), before)), registries()
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRL_FP8_SERVER"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=200)


def test_no_server_is_an_error_that_says_how_to_start_one():
    with pytest.raises(ServerGone, match="trl-fp8 serve"):
        Control("http://127.0.0.1:9", token="").wait_until_up(0)
