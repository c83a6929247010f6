"""A completion in flight while the policy changes: its tokens are those of the version that each was sampled from."""

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from vllm.v1.engine.core import EngineCore

from testing import forked_server
from testing.engines import perturb, some_scales
from testing.staged_trainer import StagedTrainer


pytestmark = pytest.mark.engine
PROMPT, TOKENS = [4, 5, 6, 7], 36


def slowed(folder: str) -> Path:
    """Return the file whose existence makes vLLM's steps slow, so that updates begin inside a completion."""
    return Path(folder).parent / "slow"


def plant_slow_steps(folder: str) -> Callable[[], None]:
    def plant() -> None:
        for name in ("step", "step_with_batch_queue"):
            step = getattr(EngineCore, name)

            def slow(self, step=step):
                if slowed(folder).exists():
                    time.sleep(0.5)
                return step(self)

            setattr(EngineCore, name, slow)

    return plant


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "staged"
    plant = plant_slow_steps(str(folder))
    with forked_server.running(checkpoint("qwen3"), folder, plant=plant, kv_cache_dtype="fp8") as running:
        yield running


def body(server, prompt: list[int], tokens: int) -> dict:
    options = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    return {"model": server.model, "prompt": prompt, "max_tokens": tokens, **options}


def sampled(server, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Return a greedy completion and its log-probs."""
    answer = httpx.post(f"{server.url}/v1/completions", json=body(server, prompt, tokens), timeout=60)
    [choice] = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


class Streamed(threading.Thread):
    """A request whose tokens arrive one by one."""

    def __init__(self, server):
        super().__init__()
        self.tokens, self.logprobs = [], []
        self._url, self._body = f"{server.url}/v1/completions", body(server, PROMPT, TOKENS) | {"stream": True}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    self.logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                    self.tokens += choice["token_ids"] or []


class Versions:
    """A policy at three versions, each with KV scales of its own."""

    def __init__(self, server):
        self.trainer = StagedTrainer(server, seed=1, kv_cache_dtype="fp8")
        self._states = []
        for seed in (1, 2, 3):
            perturb(self.trainer.model, seed)
            self._states.append({n: tensor.clone() for n, tensor in self.trainer.model.state_dict().items()})

    def sync(self, version: int) -> None:
        self.trainer.model.load_state_dict(self._states[version])
        layers = self.trainer.model.config.num_hidden_layers
        self.trainer.scales.value = some_scales(layers, version + 1)
        self.trainer.sync()


def test_a_completion_across_three_versions_equals_replaying_it(server):
    versions = Versions(server)
    versions.sync(0)
    slowed(server.folder).touch()
    request = Streamed(server)
    ends = [0]
    for version in (1, 2):
        while len(request.tokens) < ends[-1] + 2:
            assert request.is_alive(), "the request ended early"
            time.sleep(0.001)
        versions.trainer.server.begin()  # the sync pauses once more
        time.sleep(0.5)  # what was sampled before the pause arrives
        ends.append(len(request.tokens))
        versions.sync(version)
    slowed(server.folder).unlink()
    request.join()
    ends.append(TOKENS)
    assert len(request.tokens) == TOKENS and 0 < ends[1] < ends[2] < TOKENS

    # vLLM computes the caches of a request in flight anew, with new weights and new scales. So each part is what a
    # new request continues
    for version, (start, end) in enumerate(pairwise(ends)):
        versions.sync(version)
        replayed = sampled(server, PROMPT + request.tokens[:start], end - start)
        assert replayed == (request.tokens[start:end], request.logprobs[start:end]), version
    versions.sync(0)
    tokens, logprobs = sampled(server, PROMPT + request.tokens[: ends[2]], TOKENS - ends[2])
    assert logprobs != request.logprobs[ends[2] :], "else the test sees no versions"
