"""What training against a server refuses, and the seeds that it sends."""

import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import requests
import torch
from trl.generation.vllm_client import VLLMClient

from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.engine.vllm_server import mirrored_generation, server_generation
from trl_fp8.engine.vllm_server.client import server_urls
from trl_fp8.engine.vllm_server.mirrored_generation import MirroredGeneration
from trl_fp8.engine.vllm_server.seeded_client import DividedClient, SeededClient
from trl_fp8.engine.vllm_server.server_generation import ServerGeneration, tensor_parallel_size
from trl_fp8.engine.vllm_server.transports import require_device


def test_a_model_that_takes_images_is_refused_by_name():
    config = SimpleNamespace(model_type="some", get_text_config=lambda: SimpleNamespace())
    with pytest.raises(ValueError, match="vllm_mode='server' with FP8: a model of type 'some' takes images"):
        ServerGeneration._require_supported(SimpleNamespace(model=SimpleNamespace(config=config)))


@pytest.mark.parametrize(
    "device, workers, message",
    [
        ("cuda", 1, "fp8_forward='one_forward' with vllm_mode='server' on cuda: .*not batch invariant"),
        ("cpu", 2, "the server has 2 workers.*--tensor-parallel-size 1"),
        ("cpu", 1, "the server's arithmetic differs from that of the trainer's own engine .other, one."),
    ],
)
def test_one_forward_with_a_server_of_other_kernels_is_refused_by_name(device, workers, message, monkeypatch):
    def start(generation):
        layout = SimpleNamespace(held={"weight": torch.zeros(2)})
        generation.engine, generation.numerics, generation.llm = SimpleNamespace(layout=layout), "one", None

    monkeypatch.setattr(FP8VLLMGeneration, "_init_vllm", start)
    cache = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=1))
    monkeypatch.setattr(mirrored_generation.upstream, "engine_config", lambda llm: cache)
    monkeypatch.setattr(mirrored_generation, "ServerGeneration", lambda **kwargs: SimpleNamespace(numerics="other"))
    generation = object.__new__(MirroredGeneration)
    generation.accelerator = SimpleNamespace(device=torch.device(device), print=print)
    # TRL's argument is the user's flag: nobody has to set it to the server's number of workers
    generation.tensor_parallel_size, generation._server_kwargs = 1, {}
    generation.recipe = SimpleNamespace(tensor_parallel_size=workers)
    with pytest.raises(ValueError, match=message):
        generation._init_vllm()


def test_a_policy_on_a_device_that_a_transport_does_not_serve_is_refused():
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        require_device("broadcast", device)
    require_device("auto", torch.device("xpu"))
    message = "vllm_server_transport='broadcast' with a policy on xpu: it is for cpu and cuda. Set .*='auto'"
    with pytest.raises(ValueError, match=message):
        require_device("broadcast", torch.device("xpu"))
    with pytest.raises(ValueError, match="vllm_server_transport='cuda_ipc' with a policy on cpu: it is for cuda"):
        require_device("cuda_ipc", torch.device("cpu"))


def test_a_server_that_would_cut_sequences_short_is_refused(monkeypatch):
    outline = SimpleNamespace(context=128, stretch=1.0)
    monkeypatch.setattr(server_generation, "outline_of", lambda model: outline)
    engine = SimpleNamespace(base_url="http://server")
    whole, short = (SimpleNamespace(model=None, max_model_length=n, engine=engine) for n in (None, 64))
    with pytest.raises(ValueError, match="up to 64 tokens, and the trainer's may have 128: .*--max-model-len 128"):
        ServerGeneration._require_context(whole, 64)
    ServerGeneration._require_context(short, 64)


def test_each_prompt_has_a_seed_of_its_own_that_run_step_and_call_decide(monkeypatch):
    def answer(self, prompts, generation_kwargs, **options):
        return {"completion_ids": [[*prompts[0], generation_kwargs["seed"], generation_kwargs["stop"]]]}

    monkeypatch.setattr(VLLMClient, "generate", answer)
    client = object.__new__(SeededClient)

    def seeds(*seed):
        client.set_seed(seed)
        answers = client.generate([[1], [2], [1]], generation_kwargs={"stop": 9}, features=None, n=2)
        assert [(ids[0], ids[2]) for ids in answers["completion_ids"]] == [(1, 9), (2, 9), (1, 9)]
        return [ids[1] for ids in answers["completion_ids"]]

    assert seeds(3, 1, 1, 1) == seeds(3, 1, 1, 1)
    several = [seeds(3, 1, 1, 1), seeds(3, 1, 1, 2), seeds(3, 1, 0, 1), seeds(3, 2, 1, 1), seeds(4, 1, 1, 1)]
    assert len({seed for each in several for seed in each}) == 15
    assert all(0 <= seed < 2**62 for each in several for seed in each)


def test_no_prompts_have_no_completions_and_forget_the_answers_of_the_last_call(monkeypatch):
    servers = Servers(monkeypatch, a=0, b=0)
    servers.generate(20)
    servers.leave_out(servers.servers[1], "gone")
    answer = servers.client.generate([], n=2)
    assert answer == dict.fromkeys(("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"), [])
    assert servers.client.failure is None and not servers.client.has_lost_answers()


@pytest.mark.parametrize("user, found", [(1, 2), (2, 2)])
def test_the_server_decides_the_tensor_parallel_size(monkeypatch, user, found):
    assert asked(monkeypatch, user, found) == found


def test_another_tensor_parallel_size_than_the_servers_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="vllm_tensor_parallel_size=4, but the server at http://server has 2 workers"):
        asked(monkeypatch, 4, 2)


@pytest.mark.parametrize("error", [KeyError("results"), httpx.InvalidURL("no port")])
def test_another_service_at_the_address_is_an_error_of_all_ranks(monkeypatch, error):
    shared = []

    def rpc(method):
        raise error

    with pytest.raises(RuntimeError, match=f"http://server does not answer as .*{type(error).__name__}"):
        asked(monkeypatch, 1, 1, rpc=rpc, of_first=lambda value: shared.append(value) or value)
    assert isinstance(shared[0][1], RuntimeError)


def asked(monkeypatch, user, found, rpc=None, of_first=lambda value: value):
    rpc = rpc or (lambda method: [{"instance": "a"}] * found)
    control = SimpleNamespace(wait_until_up=lambda seconds: None, rpc=rpc)
    monkeypatch.setattr(server_generation, "Control", lambda url: control)
    monkeypatch.setattr(server_generation, "of_first", of_first)
    return tensor_parallel_size("http://server", 1, SimpleNamespace(is_main_process=True), user)


def test_servers_with_different_numbers_of_workers_are_refused(monkeypatch):
    def control(url):
        return SimpleNamespace(wait_until_up=lambda seconds: None, rpc=lambda method: [{}] * sizes[url])

    sizes = {"http://a": 2, "http://b": 2}
    monkeypatch.setattr(server_generation, "Control", control)
    monkeypatch.setattr(server_generation, "of_first", lambda value: value)
    first = SimpleNamespace(is_main_process=True)
    assert tensor_parallel_size("http://a,http://b", 1, first, 1) == 2
    sizes["http://b"] = 1
    with pytest.raises(ValueError, match="different numbers of workers .{'http://a': 2, 'http://b': 1}"):
        tensor_parallel_size("http://a,http://b", 1, first, 1)


def test_addresses_are_separated_by_commas_and_each_is_there_once():
    assert server_urls(" http://a:1/, http://b:1 ,") == ["http://a:1", "http://b:1"]
    for addresses in ("http://a:1,http://a:1/", ","):
        with pytest.raises(ValueError, match="name each server once"):
            server_urls(addresses)


class Servers:
    """An engine with servers that answer each prompt with its seed, and a client of them."""

    def __init__(self, monkeypatch, **delays):
        self.servers = self.serving = [SimpleServer(f"http://{name}", delay) for name, delay in delays.items()]
        by_url = {server.base_url: server for server in self.servers}
        self.reasons = []

        def answer(client, prompts, generation_kwargs, **options):
            return by_url[client.base_url].answer(prompts[0], generation_kwargs["seed"])

        def init(client, base_url, connection_timeout):
            client.base_url, client.session = base_url, requests.Session()

        monkeypatch.setattr(VLLMClient, "__init__", init)
        monkeypatch.setattr(VLLMClient, "generate", answer)
        self.client = DividedClient(self, timeout=1)

    def leave_out(self, server, reason):
        self.serving = [each for each in self.serving if each is not server]
        self.reasons.append((server.base_url, reason))

    def generate(self, count):
        self.client.set_seed((1, 2, 3))
        return self.client.generate([[number] for number in range(count)], n=1)["completion_ids"]


class SimpleServer:
    """A server that takes `delay` seconds for a prompt, and fails from its prompt number `dies_at` on."""

    def __init__(self, base_url, delay):
        self.base_url, self._delay, self.dies_at = base_url, delay, None
        self.answered, self._lock = 0, threading.Lock()

    def answer(self, prompt, seed):
        time.sleep(self._delay)
        with self._lock:
            if self.dies_at is not None and self.answered >= self.dies_at:
                raise Exception("Request failed: 500")
            self.answered += 1
        return {"completion_ids": [[*prompt, seed]], "logprobs": None}


def test_prompts_are_divided_by_requests_in_flight_and_the_division_changes_no_seed(monkeypatch):
    servers = Servers(monkeypatch, a=0.001, b=0.05)
    expected = Servers(monkeypatch, a=0).generate(400)
    assert [ids[0] for ids in expected] == list(range(400)) and len({ids[1] for ids in expected}) == 400
    monkeypatch.undo()
    servers = Servers(monkeypatch, a=0.001, b=0.1)
    assert servers.generate(400) == expected
    fast, slow = (server.answered for server in servers.servers)
    assert fast + slow == 400 and 0 < slow < 150 and not servers.reasons


@pytest.mark.parametrize("dies_at", [0, 5])
def test_all_prompts_of_a_server_that_is_lost_go_to_the_others_with_the_same_seeds(monkeypatch, dies_at):
    expected = Servers(monkeypatch, a=0).generate(200)
    monkeypatch.undo()
    servers = Servers(monkeypatch, a=0.002, b=0.002)
    servers.servers[1].dies_at = dies_at
    assert servers.generate(200) == expected
    assert servers.reasons == [("http://b", "it did not generate (Exception: Request failed: 500)")]
    assert servers.servers[0].answered == 200  # also what the other one had answered: it cannot be verified
    assert not servers.client.has_lost_answers() and servers.client.failure is None


def test_answers_of_a_server_that_is_lost_before_it_is_verified_are_known(monkeypatch):
    servers = Servers(monkeypatch, a=0, b=0)
    servers.generate(20)
    assert not servers.client.has_lost_answers()
    servers.leave_out(servers.servers[1], "gone")
    assert servers.client.has_lost_answers()
    servers.generate(20)
    assert not servers.client.has_lost_answers()


def test_without_a_server_that_is_left_the_failure_is_the_last_ones(monkeypatch):
    servers = Servers(monkeypatch, a=0, b=0)
    for server in servers.servers:
        server.dies_at = 3
    assert servers.generate(20) == [[]] * 20
    assert servers.client.failure == "Exception: Request failed: 500" and len(servers.reasons) == 1


def test_a_dead_host_is_noticed_by_probes_and_no_request_is_tried_again(monkeypatch):
    client = Servers(monkeypatch, a=0, b=0).client
    for each in client._clients.values():
        adapter = each.session.get_adapter("http://a")
        assert adapter.max_retries.total == 0
        assert (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1) in adapter.poolmanager.connection_pool_kw["socket_options"]
