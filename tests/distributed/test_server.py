"""A server of two workers, and two ranks that train on what it samples."""

import re
from pathlib import Path

import pytest
import requests

from testing import engines, forked_server
from testing.staged_trainer import StagedTrainer
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN

from .ranks import launch


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]
ACCELERATE = Path(__file__).parents[2] / "examples" / "accelerate_configs"
# With heads for two workers, and linears whose halves are whole blocks
POLICY = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=128)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "staged"
    with forked_server.running(checkpoint("qwen3", **POLICY), folder, tensor_parallel_size=2) as running:
        yield running


@pytest.fixture(scope="module")
def reports(server, tmp_path_factory):
    """What each of two ranks reports of its run and of errors of the first one. The server does not survive it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER, server.folder)
        patched.setenv(TOKEN, server.token)
        options = {"checkpoint": server.model, "url": server.url, "server": server.pid, "max_steps": 2}
        return launch("train_at_server", tmp_path_factory.mktemp("ddp"), config=ACCELERATE / "cpu_ddp.yaml", **options)


def log_probs(server: forked_server.ForkedServer) -> list[tuple]:
    """Return greedy tokens, their log-probs and those of the prompts."""
    found = []
    for prompt in engines.PROMPTS:
        body = {"model": server.model, "prompt": [prompt], "max_tokens": 16, "temperature": 0.0, "logprobs": 1}
        body |= {"prompt_logprobs": 1, "ignore_eos": True, "return_token_ids": True}
        answer = requests.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        pairs = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
        of_prompt = [row[str(token)]["logprob"] for row, token in pairs]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"], of_prompt))
    return found


def test_two_workers_compute_what_an_engine_computes_that_loads_the_checkpoint_after_each_sync(server, tmp_path):
    trainer = StagedTrainer(server, seed=1, tensor_parallel_size=2)
    seen = []
    for step in (1, 2):
        engines.perturb(trainer.model, step)
        trainer.scales.value = engines.some_scales(2, step)
        trainer.sync()
        folder = tmp_path / str(step)
        engines.write_checkpoint(folder, trainer, trainer.scales.value)
        with forked_server.running(
            str(folder), tmp_path / f"fresh_{step}", loads=True, tensor_parallel_size=2
        ) as fresh:
            seen.append(log_probs(server))
            assert seen[-1] == log_probs(fresh)
    assert seen[0] != seen[1]


def test_two_ranks_train_on_what_one_server_samples(reports):
    for report in reports:
        assert report["audit_failures"] == 0 and report["fp8"] == reports[0]["fp8"] > 0
        assert report["policy"] == reports[0]["policy"]
    rows = reports[0]["log"]
    assert [row["fp8/weight_version"] for row in rows] == [1, 2]
    assert all(0 < row["fp8/pause_seconds"] < row["fp8/sync_seconds"] for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    "failure, message",
    [
        ("no room", r"cannot be created there \(No space left on device\)"),
        ("no client", "ConnectionError: planted"),
        ("generate", r"did not generate \(ConnectionError"),
        ("sync", "no server at|weight sync failed on another rank"),
    ],
)
def test_all_ranks_raise_an_error_of_the_first_one(failure, message, reports):
    for report in reports:
        assert re.search(message, report["errors"][failure]), report["errors"]
