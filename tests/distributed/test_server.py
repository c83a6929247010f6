"""A server of two workers, and two ranks that train on what it samples."""

import re
from pathlib import Path

import pytest
import requests

from testing import engines, forked_server
from testing.staged_trainer import StagedTrainer
from trl_fp8.engine.vllm_server import broadcast
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN

from .ranks import fork


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]
ACCELERATE = Path(__file__).parents[2] / "examples" / "accelerate_configs"
# With heads for two workers, and linears whose halves are whole blocks
POLICY = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=128)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "staged"
    with forked_server.running(checkpoint("qwen3", **POLICY), folder, tensor_parallel_size=2) as running:
        yield running


@pytest.fixture
def environment(server, monkeypatch):
    monkeypatch.setenv(FOLDER, server.folder)
    monkeypatch.setenv(TOKEN, server.token)


@pytest.fixture(scope="module")
def reports(server, tmp_path_factory):
    """What each of two ranks reports of its run and of errors of the first one. The server does not survive it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER, server.folder)
        patched.setenv(TOKEN, server.token)
        options = {"checkpoint": server.model, "url": server.url, "server": server.pid, "max_steps": 2}
        return fork("train_at_server", tmp_path_factory.mktemp("ddp"), config=ACCELERATE / "cpu_ddp.yaml", **options)


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


def test_two_workers_compute_what_an_engine_computes_that_loads_the_checkpoint_after_each_sync(
    server, tmp_path, monkeypatch
):
    trainer = StagedTrainer(server, seed=1, tensor_parallel_size=2)
    seen = []
    for step in (1, 2):
        if step == 1:
            engines.perturb(trainer.model, step)
        else:
            trainer.step()  # little, so that a patch brings it
        trainer.scales.value = engines.some_scales(2, step)
        trainer.sync()
        assert (trainer.server.patch is None) == (step == 1)
        folder = tmp_path / str(step)
        engines.write_checkpoint(folder, trainer, trainer.scales.value)
        with forked_server.running(
            str(folder), tmp_path / f"fresh_{step}", loads=True, tensor_parallel_size=2
        ) as fresh:
            seen.append(log_probs(server))
            assert seen[-1] == log_probs(fresh)
    assert seen[0] != seen[1]
    # The same by broadcasts
    states = trainer.control.rpc("fp8_state")
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 10**5)
    broadcaster = StagedTrainer(server, seed=1, transport="broadcast", tensor_parallel_size=2)
    broadcaster.model.load_state_dict(trainer.model.state_dict())
    broadcaster.scales.value = trainer.scales.value
    broadcaster.sync()
    assert log_probs(server) == seen[1]
    for before, after in zip(states, broadcaster.control.rpc("fp8_state"), strict=True):
        assert after["split"] == {} and after["arrived"].keys() == before["arrived"].keys()
        whole = [name for name in before["arrived"] if name not in before["split"]]
        assert whole and all(after["arrived"][name] == before["arrived"][name] for name in whole)


def test_two_ranks_of_an_asynchronous_trainer_deliver_together(server, environment, tmp_path):
    options = {"checkpoint": server.model, "url": server.url, "max_steps": 3}
    reports = fork("train_asynchronously", tmp_path, config=ACCELERATE / "cpu_ddp.yaml", **options)
    for report in reports:
        assert report["audit_failures"] == 0 and report["model_version"] == 4
        assert report["wrong"] == [] and report["staged"] > 30
        assert all(report[name] == reports[0][name] for name in ("policy", "kv_scales"))
    rows = reports[0]["log"]
    assert [row["staleness/age_max"] for row in rows] == [0, 1, 1]
    first = rows[0]["fp8/weight_version"]  # the server had others of the test above
    assert [row["fp8/weight_version"] - first for row in rows] == [0, 1, 2]
    assert all(row["grad_norm"] > 0 for row in rows)


def test_two_ranks_train_on_what_one_server_samples(reports):
    for report in reports:
        assert report["audit_failures"] == 0 and report["fp8"] == reports[0]["fp8"] > 0
        assert report["policy"] == reports[0]["policy"]
    rows = reports[0]["log"]
    assert rows[1]["fp8/weight_version"] == rows[0]["fp8/weight_version"] + 1
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
