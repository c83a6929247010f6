"""Training against a vLLM server, which runs in processes of its own."""

import math
import os

import pytest
import requests

from testing import engines, forked_server
from testing.other_trainers import KINDS, config_of, options_of
from testing.runs import SMALL_K3, arguments, dataset, reward_digits, rows, trajectory
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN
from trl_fp8.quantization.codec.kv_scales import KV_SCALES


pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "transfer"
    with forked_server.running(checkpoint("qwen3"), folder, kv_cache_dtype="fp8") as running:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(FOLDER, running.folder)
            patched.setenv(TOKEN, running.token)
            yield running


def trainer_of(server, folder, **flags):
    args = arguments(folder, vllm_mode="server", vllm_server_base_url=server.url, **flags)
    return FP8GRPOTrainer(server.model, reward_digits, args, dataset())


def log_probs(server, tokens):
    """Log-probs of a sequence's tokens but the first, as the server computes them now."""
    request = {"model": server.model, "prompt": [tokens], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
    answer = requests.post(f"{server.url}/v1/completions", json=request | {"skip_reading_prefix_cache": True})
    answer.raise_for_status()
    [choice] = answer.json()["choices"]
    pairs = zip(choice["prompt_logprobs"][1:], tokens[1:], strict=True)
    return [row[str(token)]["logprob"] for row, token in pairs]


def numbers(trainer):
    """Return the logged rows without the count of syncs, which begins with each trainer."""
    return [
        {name: value for name, value in row.items() if name != "fp8/weight_version"} for row in trajectory(trainer)
    ]


def test_a_resumed_run_equals_the_uninterrupted_one(server, tmp_path):
    whole = trainer_of(server, tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    whole.train()
    logged = rows(whole)
    assert len(logged) == 4 and all(0 < row["mismatch/k3_kl"] < SMALL_K3 for row in logged)
    assert len({row["fp8/audited_tensors"] for row in logged}) == 1 and whole.vllm_generation.audit_failures == 0
    resumed = trainer_of(server, tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert numbers(resumed)[-2:] == numbers(whole)[2:]
    assert os.listdir(server.folder)  # both trainers live


def test_log_probs_equal_those_of_a_colocated_engine_after_each_sync(server, tmp_path):
    trainer = trainer_of(server, tmp_path)
    remote = trainer.vllm_generation
    scales = remote._one_of("carried")
    colocated = engines.start(server.model, engines.some_scales(2, 1), model=trainer.model, recipe=trainer.recipe)
    try:
        for step in (1, 2):
            engines.perturb(trainer.model, step)
            scales.calibrate = lambda step=step: engines.some_scales(2, step)
            engines.scales_of(colocated).calibrate = lambda step=step: engines.some_scales(2, step)
            remote.delivery.deliver(remote.weights.sent)
            colocated.sync_weights()
            assert (remote.last_sync.carried[KV_SCALES].values == engines.some_scales(2, step).values).all()
            for tokens in engines.PROMPTS:
                assert log_probs(server, tokens) == colocated.llm.log_probs(tokens).tolist()
    finally:
        engines.shutdown(colocated.llm)


def test_a_sync_of_another_trainer_in_the_middle_of_a_generation_stops_the_run(server, tmp_path, monkeypatch):
    first, second = trainer_of(server, tmp_path / "a"), trainer_of(server, tmp_path / "b", learning_rate=1e-2)
    client = first.vllm_generation.vllm_client
    generate = client.generate

    def overtaken(*args, **kwargs):
        output = generate(*args, **kwargs)
        monkeypatch.undo()
        second.train()
        return output

    monkeypatch.setattr(client, "generate", overtaken)
    with pytest.raises(RuntimeError):
        first.train()
    assert not rows(first)


@pytest.mark.parametrize("kind", KINDS)
def test_other_trainers_take_their_rollouts_from_a_server(kind, server, checkpoint, tmp_path):
    # SDFT and SDPO have the server score for the teacher, too
    flags = {"use_teacher_server": True, "teacher_model_kind": "live", "distillation_mode": "sampled_token"}
    flags |= {"distillation_alpha": 1.0, "max_reprompt_len": 40}  # the server's context is 64
    flags = flags if kind in ("sdft", "sdpo") else {}
    of_server = {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_max_model_length": 64}
    args = config_of(kind, tmp_path, max_steps=2, **of_server, **flags)
    options = options_of(kind, checkpoint("llama"))
    options["train_dataset"] = options.pop("train")
    options = {name: value for name, value in options.items() if value is not None}
    trainer = KINDS[kind][2](model=server.model, args=args, **options)
    trainer.train()
    logged = rows(trainer)
    assert len(logged) == 2 and trainer.vllm_generation.audit_failures == 0
    assert all(math.isfinite(row["loss"]) and row["fp8/sync_seconds"] > 0 for row in logged)
    assert all(("mismatch/k3_kl" in row) == (kind in ("rloo", "gmpo")) for row in logged)
