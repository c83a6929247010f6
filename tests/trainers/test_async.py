"""Asynchronous GRPO with FP8 rollouts, in lock-step with a real server: staleness is set, not raced."""

import json
import math
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker
from trl.experimental.async_grpo.packing import TreeRow

from testing import forked_server
from testing.async_rollouts import (
    LockStep,
    LockStepWorker,
    NoTransfer,
    ReplayWorker,
    conversations,
    normalized,
    plain_chat_tokenizer,
    random_samples,
    reward_digits_of_chats,
    without_flash_attention,
)
from testing.processes import fork
from testing.runs import SHORT, SMALL_K3, arguments, dataset, recorded, reward_digits, rows
from trl_fp8 import FP8AsyncGRPOConfig, FP8AsyncGRPOTrainer, FP8GRPOTrainer
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN
from trl_fp8.trainers.versioned_samples import DROPPED, OLDEST_VERSION, VERSIONS, VersionedCollator


OFF = {"fp8_weights": False, "kv_cache_dtype": "auto"}
SAVES = {"save_strategy": "steps", "save_steps": 2}


class LockStepTrainer(LockStep, FP8AsyncGRPOTrainer):
    pass


@pytest.fixture(scope="module", autouse=True)
def packed_attention_on_cpu():
    """Let TRL's trainer compute without a GPU, also in tests without a server."""
    with without_flash_attention():
        yield


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "transfer"
    with forked_server.running(checkpoint("qwen3"), folder, kv_cache_dtype="fp8") as running:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(FOLDER, running.folder)
            patched.setenv(TOKEN, running.token)
            yield running


def config_of(folder, kind=FP8AsyncGRPOConfig, **flags):
    return arguments(folder, kind, **{"token_budget": -1, "bf16": False} | flags)


def reward(completions, row):
    return reward_digits(completions)


def trainer_of(server, folder, staleness=0, prompts=32, first=0, advantages=normalized, peft_config=None, **flags):
    """Return a trainer in lock-step with the server; `first` is the number of its first batch."""
    processing = plain_chat_tokenizer()
    data = conversations(prompts)
    prompt_ids = [processing(row["prompt"][0]["content"])["input_ids"] for row in data]
    options = {"staleness": staleness, "first": first, "advantages": advantages}
    worker = LockStepWorker(server.url, prompt_ids, reward, seed=SHORT["seed"], **options)
    args = config_of(folder, vllm_server_base_url=server.url, **flags)
    return LockStepTrainer(
        server.model,
        None,
        args,
        train_dataset=data,
        processing_class=processing,
        rollout_worker=worker,
        peft_config=peft_config,
    )


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_three_steps_are_audited_and_their_kv_scales_calibrated(server, tmp_path, capsys):
    trainer = trainer_of(server, tmp_path)
    assert "FP8" in capsys.readouterr().out and trainer.plan.fp8_share > 0
    trainer.train()
    logged = rows(trainer)
    assert len(logged) == 3 and trainer.vllm_generation.audit_failures == 0
    for row in logged:
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert row["fp8/sync_seconds"] > 0 and row["fp8/kv_scale_min"] > 0 and row["fp8/audited_tensors"] > 0
        assert row["sample/staleness_max"] == 0
    first = logged[0]["fp8/weight_version"]
    assert [row["fp8/weight_version"] for row in logged] == [first, first + 1, first + 2]
    log = [json.loads(line) for line in Path(tmp_path, "fp8_run.jsonl").read_text().splitlines()]
    generations = [row for row in log if row["kind"] == "rollouts"]
    assert [row["step"] for row in generations] == [0, 1, 2] and all(row["kv_scales"] for row in generations)
    assert logged[0]["fp8/kv_margin"] == 2 * logged[1]["fp8/kv_margin"]  # of prompts alone, then of rollouts


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_ages_are_those_that_were_set_and_mismatch_is_told_from_staleness(server, tmp_path):
    trainer = trainer_of(server, tmp_path, staleness=2, max_steps=4)
    trainer.train()
    logged = rows(trainer)
    assert [row["staleness/age_max"] for row in logged] == [0, 1, 2, 2]
    assert [row["staleness/fraction_stale"] for row in logged] == [0, 1, 1, 1]
    assert ["mismatch/k3_kl" in row for row in logged] == [True, False, False, False]  # known of fresh tokens alone
    assert 0 < logged[0]["mismatch/k3_kl"] < SMALL_K3
    beyond = logged[1]["staleness/k1_kl/age_1"] - logged[0]["mismatch/k1_kl"]
    assert logged[1]["staleness/k1_beyond_mismatch"] == pytest.approx(beyond)
    assert logged[2]["staleness/k3_kl/age_2"] > logged[0]["staleness/k3_kl/age_0"]
    assert all(row["mismatch/fraction_missing"] == 0 and row["correction/weight_max"] <= 2 for row in logged)


def sync_advantages(rewards):
    """Return advantages of a group as TRL's synchronous trainer computes them."""
    values = torch.tensor(rewards)
    return ((values - values.mean()) / (values.std() + 1e-4)).numpy()


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_at_staleness_0_losses_equal_those_of_the_synchronous_trainer(server, tmp_path):
    """Both train on the same rollouts. The synchronous trainer pads where the other packs, so that sums round
    elsewhere; its advantages divide by the unbiased deviation, which the worker does here, too. Without Adam, whose
    first steps are signs: those of gradients near 0 depend on rounding.
    """
    same = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "bf16": False}
    flags = {"vllm_mode": "server", "vllm_server_base_url": server.url, "shuffle_dataset": False} | same
    args = arguments(tmp_path / "sync", **flags)
    synchronous = FP8GRPOTrainer(server.model, reward_digits, args, dataset(2))
    sampled = recorded(synchronous, "_generate", lambda output, prompts: output[1][:])
    synchronous.train()
    trainer = trainer_of(server, tmp_path / "async", prompts=2, advantages=sync_advantages, **same)
    trainer.train()
    batches = trainer.rollout_worker.batches
    completions = [
        [sample.input_ids[sample.completion_mask == 1].tolist() for sample in batch] for batch in batches[:3]
    ]
    assert completions == sampled
    both = zip(rows(trainer), rows(synchronous), strict=True)
    for own, other in both:
        for name in ("loss", "grad_norm", "mismatch/k1_kl", "mismatch/k3_kl", "correction/weight_mean"):
            assert own[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
        for name in ("fp8/kv_scale_min", "fp8/kv_scale_max", "fp8/audited_tensors"):
            assert own[name] == other[name], name


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_resumed_run_equals_the_uninterrupted_one(server, tmp_path):
    whole = trainer_of(server, tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    whole.train()
    resumed = trainer_of(server, tmp_path, max_steps=4, first=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    names = ("loss", "grad_norm", "reward", "mismatch/k3_kl", "correction/weight_mean", "fp8/kv_scale_max")
    logged = [[row[name] for name in names] for row in rows(whole)]
    assert [[row[name] for name in names] for row in rows(resumed)][-2:] == logged[2:]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_adapters_are_merged_for_a_sync_and_the_policy_is_exported(server, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = trainer_of(server, tmp_path, max_steps=2, peft_config=lora)
    trainer.train()
    assert trainer.vllm_generation.audit_failures == 0 and all(row["grad_norm"] > 0 for row in rows(trainer))
    trainer.save_fp8_model(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_trls_worker_samples_in_a_process_of_its_own(server, tmp_path):
    trainer = with_trls_worker(server, tmp_path, max_steps=4)
    trainer.train()
    logged = rows(trainer)
    assert trainer.vllm_generation.audit_failures == 0
    assert all(math.isfinite(row["loss"]) and row["mismatch/fraction_missing"] == 0 for row in logged)
    assert len(logged) == 4 and trainer.model_version == 5
    assert all(0 <= row["staleness/age_max"] <= 3 for row in logged)  # TRL takes a batch in advance
    first = logged[0]["fp8/weight_version"]
    assert [row["fp8/weight_version"] - first for row in logged] == [0, 1, 2, 3]


def with_trls_worker(server, folder, **flags):
    """Return a trainer whose rollouts come from a process of TRL's."""
    options = {"train_dataset": conversations(), "processing_class": plain_chat_tokenizer()}
    flags = {"max_staleness": 2, "token_budget": 256} | flags
    args = config_of(folder, vllm_server_base_url=server.url, **flags)
    return FP8AsyncGRPOTrainer(server.model, reward_digits_of_chats, args, **options)


def killed_in_its_fourth_step(server, folder, note):
    """Train, and write to `note` what was known when this process ended: versions, and the process of TRL's worker."""
    trainer = with_trls_worker(server, folder, max_steps=5, **SAVES)
    step = trainer.training_step

    def dying_step(*args, **kwargs):
        if trainer.state.global_step == 3:
            versions = {"policy": trainer.model_version, "sent": trainer.vllm_generation.engine.version}
            note.write_text(json.dumps(versions | {"worker": trainer.rollout_worker._process.pid}))
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **kwargs)

    trainer.training_step = dying_step
    trainer.train()


def running_requests(server):
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def eventually(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_leaves_no_worker_and_goes_on_with_versions_that_nobody_had(
    server, tmp_path, monkeypatch
):
    context = multiprocessing.get_context("fork")  # processes that import everything would add nothing but time
    monkeypatch.setattr(async_rollout_worker.mp, "get_context", lambda method: context)
    note, log = tmp_path / "note", tmp_path / "log"
    killed = fork(partial(killed_in_its_fourth_step, server, tmp_path / "run", note), log)
    try:
        _, status = os.waitpid(killed, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, log.read_text()[-4000:]
        before = json.loads(note.read_text())
        worker = Path(f"/proc/{before['worker']}/stat")
        # A dead process may wait for its parent to take notice
        eventually(lambda: not worker.exists() or worker.read_text().rpartition(")")[2].split()[0] == "Z")
        eventually(lambda: running_requests(server) == 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(killed, signal.SIGKILL)

    known = json.loads((tmp_path / "run" / "checkpoint-2" / "rollout_state.json").read_text())["model_version"]
    assert known < before["policy"]
    resumed = with_trls_worker(server, tmp_path / "run", max_steps=5, **SAVES)
    trained_on = recorded(resumed, "compute_loss", lambda loss, model, inputs, *_, **__: inputs[VERSIONS].tolist())
    resumed.train(resume_from_checkpoint=True)
    logged = rows(resumed)
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5] and resumed.vllm_generation.audit_failures == 0
    versions = {version for [row] in trained_on for version in row}
    assert before["policy"] < min(versions) <= max(versions) <= resumed.model_version
    assert [row["fp8/weight_version"] - before["sent"] for row in logged[2:]] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and row["mismatch/fraction_missing"] == 0 for row in logged)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_server_that_would_cut_completions_short_is_refused(server, tmp_path):
    with pytest.raises(ValueError, match="max_completion_length=64, but .* serves sequences of up to 64 tokens"):
        trainer_of(server, tmp_path, max_completion_length=64)


def test_with_every_fp8_flag_off_it_is_trl_bit_for_bit(checkpoint, tmp_path):
    results = []
    for kind, config, flags in (
        (AsyncGRPOTrainer, AsyncGRPOConfig, {}),
        (FP8AsyncGRPOTrainer, FP8AsyncGRPOConfig, OFF),
    ):
        trainer = kind(
            checkpoint("qwen3"),
            args=config_of(tmp_path / kind.__name__, config, **flags),
            train_dataset=conversations(),
            processing_class=plain_chat_tokenizer(),
            rollout_worker=ReplayWorker(random_samples(4)),  # one more: a batch is taken in advance
            weight_transfer=NoTransfer(),
        )
        trainer.train()
        names = ("loss", "grad_norm", "ratio", "kl", "entropy")
        results.append([[row[name] for name in names] for row in rows(trainer)])
        results[-1].append({name: weight.detach().clone() for name, weight in trainer.model.named_parameters()})
    (*trls_rows, trls_weights), (*own_rows, own_weights) = results
    assert trls_rows == own_rows and len(own_rows) == 3
    assert all(torch.equal(trls_weights[name], own_weights[name]) for name in trls_weights)


@pytest.mark.parametrize(
    "flags, named",
    [
        ({"fp8_forward": "one_forward"}, "fp8_forward='one_forward' with FP8AsyncGRPOConfig: its kernels need"),
        ({"fp8_base": True}, "fp8_base=True with FP8AsyncGRPOConfig"),
        ({"router_replay": "monitor"}, "router_replay='monitor' with FP8AsyncGRPOConfig: the server returns no"),
        ({"vllm_engine_kwargs": {"enforce_eager": True}}, "vllm_engine_kwargs=.* the engine starts in the server"),
        ({"simulate_kv_cache": True}, "simulate_kv_cache=True with FP8AsyncGRPOConfig: rollouts of several versions"),
        ({"vllm_server_base_url": "http://a,http://b"}, "='http://a,http://b' with FP8AsyncGRPOConfig: TRL's worker"),
        ({"use_vllm": False} | OFF, "use_vllm=False with FP8AsyncGRPOConfig"),
    ],
)
def test_flags_that_need_an_engine_in_the_process_are_refused_by_name(flags, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        config_of(tmp_path, **flags)


def test_another_transfer_of_weights_and_prompts_that_are_text_are_refused(checkpoint, tmp_path):
    options = {"args": config_of(tmp_path), "processing_class": plain_chat_tokenizer()}
    with pytest.raises(ValueError, match="weight_transfer=.*NoTransfer.* with FP8 rollouts"):
        FP8AsyncGRPOTrainer(
            checkpoint("qwen3"), train_dataset=conversations(), weight_transfer=NoTransfer(), **options
        )
    with pytest.raises(ValueError, match="train_dataset has prompts that are text"):
        FP8AsyncGRPOTrainer(checkpoint("qwen3"), reward_digits, train_dataset=dataset(), **options)


def replayed(checkpoint, folder, batches, earlier=(), **flags):
    """Return a trainer over samples that are there, without a server; `earlier`: further ones before them."""
    return FP8AsyncGRPOTrainer(
        checkpoint,
        args=config_of(folder, **OFF, max_steps=len(batches) - 1, **flags),  # a batch is taken in advance
        train_dataset=conversations(),
        processing_class=plain_chat_tokenizer(),
        rollout_worker=ReplayWorker([earlier, *batches]),
        weight_transfer=NoTransfer(),
    )


def test_samples_of_versions_that_this_run_has_not_sent_are_dropped(checkpoint, tmp_path, caplog):
    """A worker that outlived another run made them: with a lower version, or a higher one if that run was longer."""
    [samples] = random_samples(1, seed=1)
    found = []
    for version in (None, 0, 9):
        earlier = [] if version is None else [replace(sample, model_version=version) for sample in samples]
        flags = {"rollout_correction": "fp8_token_tis"}
        caplog.clear()
        trainer = replayed(checkpoint("qwen3"), tmp_path / str(version), random_samples(2), earlier, **flags)
        trainer.train()
        [row] = rows(trainer)
        found.append((row["loss"], row["grad_norm"], row.get(DROPPED, 0), row["staleness/age_mean"]))
        warned = [record.message for record in caplog.records if "are dropped" in record.message]
        assert [f"samples of version {version}" in text for text in warned] == [True] * bool(earlier)
    assert found == [(*found[0][:2], dropped, 0) for dropped in (0, len(samples), len(samples))]


def test_all_ranks_know_the_oldest_sample_of_a_batch():
    """KV scales follow what clipped under the scales of these samples, and all ranks send the same scales."""
    [samples] = random_samples(1)
    packed = [TreeRow(), TreeRow()]  # of two ranks
    for row, sample, version in zip(packed, samples, (3, 2), strict=False):
        names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics")
        row.add({name: getattr(sample, name) for name in names} | {"model_version": version})
    batch = VersionedCollator(pad_token_id=0, num_processes=2).torch_call([packed])
    assert batch[OLDEST_VERSION].tolist() == [2, 2] and batch[VERSIONS].tolist() == [[3] * 8, [2] * 8]


def log_ratios(model, batch):
    """Return log-probs of the trained tokens of each sample, by a plain forward, and log-ratios to the rollouts."""
    logps, ratios = [], []
    for sample in batch:
        ids, mask = torch.as_tensor(sample.input_ids), torch.as_tensor(sample.completion_mask).bool()
        all_logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        logps.append(all_logps[mask[1:]])
        ratios.append(logps[-1].detach() - torch.as_tensor(sample.old_log_probs)[mask].double())
    return logps, ratios


# Weight of each token of a sample, from its log-ratios [T], all in FP64
WEIGHTS = {
    "token_truncate": lambda log_r: log_r.exp().clamp(max=2.0),
    "token_mask": lambda log_r: log_r.exp() * (log_r.exp() <= 5.0),
    "sequence_truncate": lambda log_r: log_r.sum().exp().clamp(max=2.0).expand_as(log_r),
    "geometric": lambda log_r: log_r.mean().exp().clamp(max=1.1).expand_as(log_r),
    "rejected": lambda log_r: log_r.exp().clamp(max=2.0) * (log_r.exp() >= 0.5),
    "shrunk": lambda log_r: log_r.exp().clamp(max=2.0) * (log_r.exp() >= 0.5),
    "unweighted": lambda log_r: torch.ones_like(log_r),
}
CORRECTIONS = {
    "token_truncate": "fp8_token_tis",
    "token_mask": {"level": "token", "bound": "mask", "bound_max": 5.0},  # AReaL's cap of the behaviour weight
    "sequence_truncate": {"level": "sequence"},
    "geometric": {"level": "geometric", "bound_max": 1.1},
    "rejected": {"reject": ["token_ratio:0.5:"]},
    "shrunk": {"reject": ["token_ratio:0.5:"], "denominator": "shrink"},
    "unweighted": {"level": None},
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_decoupled_loss_and_its_gradient_are_those_of_an_fp64_oracle(name, checkpoint, tmp_path):
    """At the start of a step u = pi / pi_prox is 1, so the loss is -mean(w A) and its gradient -mean(w A d log pi)."""
    batches = random_samples(2)
    trainer = replayed(checkpoint("qwen3"), tmp_path, batches, rollout_correction=CORRECTIONS[name])
    losses = recorded(trainer, "compute_loss", lambda loss, *_, **__: loss.item())
    trainer.train()

    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.float64)
    logps, ratios = log_ratios(model, batches[0])
    weights = [WEIGHTS[name](log_r) for log_r in ratios]
    kept = sum(int((weight > 0).sum()) for weight in weights) if name == "shrunk" else sum(map(len, weights))
    advantages = [sample.advantage for sample in batches[0]]
    terms = zip(weights, advantages, logps, strict=True)
    objective = sum((weight * advantage * logp).sum() for weight, advantage, logp in terms) / kept
    objective.backward()
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm().item()
    pairs = zip(weights, advantages, strict=True)
    expected = -sum((weight * advantage).sum().item() for weight, advantage in pairs) / kept

    assert losses == [pytest.approx(expected, rel=1e-5)]
    assert rows(trainer)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    unweighted = -sum(len(weight) * advantage for weight, advantage in zip(weights, advantages, strict=True)) / kept
    assert (abs(expected - unweighted) > 1e-3) == (name != "unweighted"), "else the test sees no weights"


@pytest.mark.parametrize("flags", [{"vllm_importance_sampling_correction": False}, {"rollout_correction": "monitor"}])
def test_without_a_correction_the_loss_has_trls_combined_ratio(flags, checkpoint, tmp_path):
    batches = random_samples(2)
    losses = []
    for folder, chosen in (("own", flags), ("bypass", {"rollout_correction": {"level": None, "bypass": True}})):
        trainer = replayed(checkpoint("qwen3"), tmp_path / folder, batches, **chosen)
        note = recorded(trainer, "compute_loss", lambda loss, *_, **__: loss.item())
        trainer.train()
        losses += note
        ratio = rows(trainer)[0]["ratio"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.float64)
    logps, ratios = log_ratios(model, batches[0])
    total, count = 0.0, 0
    for log_r, sample in zip(ratios, batches[0], strict=True):
        r = log_r.exp()
        total -= torch.min(r * sample.advantage, r.clamp(0.8, 1.2) * sample.advantage).sum().item()
        count += len(r)
    assert losses == [pytest.approx(total / count, rel=1e-5)] * 2
    assert ratio != 1


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_server_that_is_lost_gets_the_latest_weights_again(server, tmp_path):
    """Last: the module's server is another process afterwards."""
    trainer = trainer_of(server, tmp_path, max_steps=2)
    worker, sample = trainer.rollout_worker, trainer.rollout_worker._sample
    request = {"model": server.model, "prompt": [[4, 5, 6]], "max_tokens": 2}

    def lost_once() -> None:
        if worker.version == 2:
            server.end(signal.SIGKILL)
            folder = Path(server.folder)
            options = {"port": server.port, "kv_cache_dtype": "fp8", "wait": 1.0}
            server.pid = forked_server.start(server.model, folder, **options).pid
            assert trainer.vllm_generation.is_replaced()
            assert httpx.post(f"{server.url}/v1/completions", json=request, timeout=30).status_code == 503
            trainer._while_empty()  # as where TRL waits for a sample
            assert not trainer.vllm_generation.is_replaced()
            assert httpx.post(f"{server.url}/v1/completions", json=request, timeout=30).status_code == 200
        sample()

    worker._sample = lost_once
    trainer.train()
    assert len(rows(trainer)) == 2 and trainer.vllm_generation.audit_failures == 0
    assert {each.model_version for each in worker.batches[1]} == {2}
