"""What training against a server refuses, and the seeds that it sends."""

from types import SimpleNamespace

import httpx
import pytest
from trl.generation.vllm_client import VLLMClient

from trl_fp8.engine.vllm_server import server_generation
from trl_fp8.engine.vllm_server.server_generation import SeededClient, ServerGeneration, tensor_parallel_size


def test_a_model_that_takes_images_is_refused_by_name():
    config = SimpleNamespace(model_type="some", get_text_config=lambda: SimpleNamespace())
    with pytest.raises(ValueError, match="vllm_mode='server' with FP8: a model of type 'some' takes images"):
        ServerGeneration._require_supported(SimpleNamespace(model=SimpleNamespace(config=config)))


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

    def seeds(*occasion):
        client.begin(occasion)
        answers = client.generate([[1], [2], [1]], generation_kwargs={"stop": 9}, features=None, n=2)
        assert [(ids[0], ids[2]) for ids in answers["completion_ids"]] == [(1, 9), (2, 9), (1, 9)]
        return [ids[1] for ids in answers["completion_ids"]]

    assert seeds(3, 1, 1, 1) == seeds(3, 1, 1, 1)
    several = [seeds(3, 1, 1, 1), seeds(3, 1, 1, 2), seeds(3, 1, 0, 1), seeds(3, 2, 1, 1), seeds(4, 1, 1, 1)]
    assert len({seed for each in several for seed in each}) == 15
    assert all(0 <= seed < 2**62 for each in several for seed in each)


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
    assert isinstance(shared[0], RuntimeError)


def asked(monkeypatch, user, found, rpc=None, of_first=lambda value: value):
    rpc = rpc or (lambda method: [{"instance": "a"}] * found)
    control = SimpleNamespace(wait_until_up=lambda seconds: None, rpc=rpc)
    monkeypatch.setattr(server_generation, "Control", lambda url: control)
    monkeypatch.setattr(server_generation, "of_first", of_first)
    return tensor_parallel_size("http://server", 1, SimpleNamespace(is_main_process=True), user)
