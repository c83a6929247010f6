"""`SeededClient`: TRL's client with a seed for each prompt; `DividedClient`: the same for several servers."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Lock

import numpy as np
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient
from urllib3.connection import HTTPConnection

from .server_link import ServerLink
from .staged_engine import StagedEngine


CONCURRENT = 64  # requests at a time, for each server
# A host that has lost power closes no connection. These options end it after a minute without an answer
KEEP_ALIVE = [
    *HTTPConnection.default_socket_options,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),  # milliseconds without an answer to what was sent
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class SeededClient(VLLMClient):
    """TRL's client with one request and one seed for each prompt.

    A server's own generators go on from run to run, so that a resumed run would sample other tokens. If a prompt has
    several completions, vLLM adds the number of each completion to the seed of the request.
    """

    _seed: tuple[int, ...] = ()
    failure: str | None = None  # error of the latest call, which then returned empty completions

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for scheme in ("http://", "https://"):
            retries = self.session.get_adapter(scheme).max_retries  # as TRL has set them
            self.session.mount(scheme, KeptAlive(max_retries=retries, pool_maxsize=CONCURRENT))

    def set_seed(self, seed: tuple[int, ...]) -> None:
        """Set the seed of the next call."""
        self._seed = seed

    def generate(self, prompts: list[list[int]], *, generation_kwargs: dict | None = None, **options) -> dict:
        options.pop("features", None)
        requests = []
        for index, prompt in enumerate(prompts):
            [number] = np.random.SeedSequence([*self._seed, index]).generate_state(1, np.uint64)
            seed = int(number) >> 2  # fits in int64, also with the number of a completion added
            seeded = {**(generation_kwargs or {}), "seed": seed}
            requests.append({"prompts": [prompt], "generation_kwargs": seeded, **options})
        self.failure = None
        answers = []
        try:
            answers = self._answers(requests)
        except Exception as error:  # of any kind, as TRL raises `Exception`. `ServerGeneration` raises on all ranks
            self.failure = f"{type(error).__name__}: {error}"
        if not answers:  # after an error, or without prompts
            empty = [[] for _ in range(len(prompts) * options.get("n", 1))]
            return {"prompt_ids": prompts, "completion_ids": empty, "logprobs": empty, "logprob_token_ids": empty}
        merged = {}
        for key, first in answers[0].items():
            if first is None:  # log-probs, for a trainer that requests none (distillation)
                merged[key] = None
            else:
                merged[key] = list(chain.from_iterable(answer[key] for answer in answers))
        return merged

    def _answers(self, requests: Sequence[dict]) -> list[dict]:
        """Return the answer to each request. A request is the keyword arguments of TRL's `generate`."""
        generate = super().generate  # TRL's method, not the one above
        with ThreadPoolExecutor(CONCURRENT) as executor:
            return list(executor.map(lambda request: generate(**request), requests))


class DividedClient(SeededClient):
    """Client of the servers of an engine. Each prompt goes to the server with the fewest requests in flight. Among
    servers with equally many, it goes to the server that was sent the fewest requests so far.

    A server that fails is left out. Its prompts go to the other servers with the same seeds, even prompts that the
    server has answered, because nobody can verify any more which policy it sampled from.
    """

    def __init__(self, engine: StagedEngine, timeout: float):
        super().__init__(base_url=engine.servers[0].base_url, connection_timeout=timeout)
        self._engine = engine
        self._clients: dict[ServerLink, VLLMClient] = {}
        for server in engine.servers:
            client = VLLMClient(base_url=server.base_url, connection_timeout=timeout)
            for scheme in ("http://", "https://"):
                client.session.mount(scheme, KeptAlive(pool_maxsize=CONCURRENT))  # without TRL's minute of retries
            self._clients[server] = client
        self._in_flight = dict.fromkeys(engine.servers, 0)
        self._sent = dict.fromkeys(engine.servers, 0)  # all requests so far
        self._answered: list[ServerLink] = []  # the server of each prompt of the latest call
        self._lock = Lock()

    def has_lost_answers(self) -> bool:
        """Return whether a server that answered prompts of the latest call has been left out since."""
        return not set(self._answered).issubset(self._engine.serving)

    def _answers(self, requests: Sequence[dict]) -> list[dict]:
        answers = [{}] * len(requests)
        self._answered = [None] * len(requests)
        while self.has_lost_answers():  # at first True: no prompt has a server
            serving = self._engine.serving
            due = [index for index, server in enumerate(self._answered) if server not in serving]
            with ThreadPoolExecutor(CONCURRENT * len(serving)) as executor:
                new_answers = executor.map(lambda index: self._answer(requests[index]), due)
                for index, (server, answer) in zip(due, new_answers, strict=True):
                    answers[index] = answer
                    self._answered[index] = server
        return answers

    def _answer(self, request: dict) -> tuple[ServerLink, dict]:
        """Return a server and its answer to a request. If the last server that is left fails, raise its error."""

        def load(server: ServerLink) -> tuple[int, int]:
            return self._in_flight[server], self._sent[server]

        while True:
            with self._lock:
                server = min(self._engine.serving, key=load)
                self._in_flight[server] += 1
                self._sent[server] += 1
            try:
                return server, self._clients[server].generate(**request)
            except Exception as error:  # of any kind, as TRL raises `Exception`
                with self._lock:
                    if self._engine.serving == [server]:
                        raise
                    if server in self._engine.serving:
                        self._engine.leave_out(server, f"it did not generate ({type(error).__name__}: {error})")
            finally:
                with self._lock:
                    self._in_flight[server] -= 1


class KeptAlive(HTTPAdapter):
    """Adapter for HTTP connections with the options `KEEP_ALIVE`, which notice a dead host."""

    def init_poolmanager(self, *args, **kwargs) -> None:
        super().init_poolmanager(*args, socket_options=KEEP_ALIVE, **kwargs)
