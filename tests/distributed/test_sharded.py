"""Policies sharded by FSDP2 and ZeRO-3 over two ranks, under the accelerate configurations that users launch with."""

from pathlib import Path

import pytest

from .ranks import launch


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

ACCELERATE = Path(__file__).parents[2] / "examples" / "accelerate_configs"
SHARDED = {"FSDP": ACCELERATE / "fsdp2.yaml", "DEEPSPEED": ACCELERATE / "zero3.yaml"}
# accelerate takes FSDP and DeepSpeed for GPU matters (see worker.shard_on_cpu), and TRL takes bf16 for one, too
FLAGS = dict(use_cpu=False, bf16=False, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)


@pytest.fixture(scope="module", params=SHARDED)
def reports(request, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    flags = FLAGS | {"fp8_forward": "full", "kv_calibration": "policy"}
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    flags |= {"lora": lora, "lora_flags": FLAGS | {"learning_rate": 0.01}}
    made = launch("train_and_lora", folder, config=SHARDED[request.param], checkpoint=checkpoint("qwen3"), **flags)
    assert all(report["distributed_type"] == request.param for report in made)
    return made


def test_every_ranks_engine_holds_the_same_policy(reports):
    first, second = reports
    assert first["engine"] == second["engine"]
    assert first["log_probs"] == second["log_probs"]
    assert first["kv_scales"] == second["kv_scales"]
    assert first["audit_failures"] == second["audit_failures"] == 0


def test_a_sharded_policy_computes_what_the_engine_computes(reports):
    rows = reports[0]["log"]
    assert len(rows) == 3 and len({row["grad_norm"] for row in rows}) == 3
    assert all(row["mismatch/logp_difference_mean"] < 1e-5 for row in rows)
    # evaluation is a forward without a backward: FSDP2 leaves parameters unsharded there, and the next sync reads them
    assert reports[0]["evaluated"]


def test_an_export_holds_what_a_sync_sends(reports):
    assert [report["export"] for report in reports] == [[], None]


def test_one_parameter_is_gathered_at_a_time(reports):
    if reports[0]["distributed_type"] == "FSDP":  # ZeRO-3 gathers in a context manager of its own
        assert reports[0]["gathered"] > 50  # 25 parameters, several syncs
        assert reports[0]["most_gathered"] <= 2  # the one that is quantized and the one that is being gathered


def test_lora_on_a_sharded_policy(reports):
    first, second = (report["lora"] for report in reports)
    assert first["distributed_type"] == reports[0]["distributed_type"]
    assert first["engine"] == second["engine"] != reports[0]["engine"] and first["log_probs"] == second["log_probs"]
    rows = first["log"]
    assert len(rows) == 3 and all(row["mismatch/logp_difference_mean"] < 0.3 for row in rows)
