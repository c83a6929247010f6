"""Training against a vLLM server, which runs in processes of its own."""

import math
import os
from pathlib import Path

import pytest

from testing import engines, forked_server, patched_training
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


@pytest.fixture(scope="module")
def second(server):
    """Return a second server, which reads the same folder as the first one."""
    folder = Path(server.folder)
    with forked_server.running(server.model, folder, kv_cache_dtype="fp8") as running:
        yield running


def trainer_of(server, folder, **flags):
    args = arguments(folder, vllm_mode="server", vllm_server_base_url=server.url, **flags)
    return FP8GRPOTrainer(server.model, reward_digits, args, dataset(), eval_dataset=dataset(2))


def numbers(trainer):
    """Return the logged rows without the count of syncs, which begins with each trainer."""
    return [
        {name: value for name, value in row.items() if name not in patched_training.COUNTED}
        for row in trajectory(trainer)
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
            remote.delivery.deliver(remote.weights.tensors_to_send)
            colocated.sync_weights()
            assert (remote.last_sync.carried[KV_SCALES].values == engines.some_scales(2, step).values).all()
            for tokens in engines.PROMPTS:
                assert server.log_probs(tokens) == colocated.llm.log_probs(tokens).tolist()
    finally:
        engines.shutdown(colocated.llm)


def test_a_policy_that_follows_an_engine_of_its_own_has_no_mismatch_with_the_server(server, tmp_path):
    flags = {"fp8_forward": "one_forward", "max_steps": 3, "learning_rate": 1e-3}
    trainer = trainer_of(server, tmp_path, eval_strategy="steps", eval_steps=2, **flags)
    trainer.train()
    generation = trainer.vllm_generation
    logged = rows(trainer)
    evaluated = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(logged) == 3 and len(evaluated) == 2
    for row in logged:
        assert row["mismatch/logp_difference_max"] == row["mismatch/k3_kl"] == 0
        assert 0 < row["fp8/pause_seconds"] < row["fp8/sync_seconds"]
    versions = [row["fp8/weight_version"] for row in logged]
    assert versions == [versions[0], versions[0] + 1, versions[0] + 3]
    assert all(row["eval_mismatch/logp_difference_max"] == 0 for row in evaluated)
    assert len({row["loss"] for row in logged}) > 1 and generation.audit_failures == 0
    own, remote = (each.delivery for each in (generation, generation.server))
    assert remote.last.audited_tensors == own.last.audited_tensors > 0
    version = generation.server.engine.version
    generation.send_weights()  # to the own engine; the server gets them when it has to generate
    assert generation.server.engine.version == version
    generation.generate([[4, 5, 6]], None, 1)
    assert generation.server.engine.version == version + 1
    # Nothing is sampled once the own engine holds something else
    generation.engine.layout.held["model.norm.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="have changed since the last sync: model.norm.weight"):
        generation.generate([[4, 5, 6]], None, 1)
    engines.shutdown(generation.llm)


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


def test_steps_by_patches_equal_steps_by_whole_deliveries_with_one_of_two_servers_killed_in_between(
    server, second, tmp_path, caplog
):
    """Last: one of the module's servers is another process afterwards."""
    servers = [server, second]
    restart = patched_training.Restart(second, 5, tmp_path)
    options = {"restart": restart, "vllm_server_transport": "broadcast"}  # of the two whole deliveries of each server
    whole = patched_training.trained(servers, tmp_path / "whole", 12, whole=True)
    patched = patched_training.trained(servers, tmp_path / "patched", 12, whole=False, **options)
    assert set(whole[3]["fp8/patch_over_whole"]) == {1.0} and set(whole[3]["fp8/lost_servers"]) == {0.0}
    # Killed in the generation of step 5; step 6 does without it; it is there again for step 7, and gets all
    assert patched[3]["fp8/lost_servers"] == [float(step == 6) for step in range(12)]
    shares = patched[3]["fp8/patch_over_whole"]
    assert shares.pop(0) == 1 and 0.5 < shares.pop(6) < 0.55 and all(0 < share < 0.1 for share in shares)
    left_out = [record.message for record in caplog.records if "is left out" in record.message]
    assert len(left_out) == 1 and left_out[0].startswith(second.url) and "it did not generate" in left_out[0]
    assert patched_training.equal(whole, patched)
    assert len({str(rollout[1]) for rollout in whole[1]}) == 12  # other ones in each step
