"""One engine over two ranks: each gets its own rows, columns and heads of every tensor."""

import pytest

from distributed.ranks import launch


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

SHAPE = {"head_dim": 128, "intermediate_size": 512}  # 2 KV heads of 128: each rank gets whole blocks


def test_a_synced_engine_equals_one_that_loaded_the_checkpoint(checkpoint, tmp_path):
    folder = checkpoint("qwen3", **SHAPE)
    synced = launch("tensor_parallel", tmp_path, checkpoint=folder, fp8_forward="full")
    assert [report["qkv_shape"] for report in synced] == [[512, 128]] * 2  # 2 + 1 + 1 of 4 + 2 + 2 heads
    assert synced[0]["engine"] != synced[1]["engine"]  # different shards
    loaded = launch("fresh_engine", tmp_path, checkpoint=folder)
    for before, after in zip(synced, loaded, strict=True):
        assert before["log_probs"] == after["log_probs"]
        assert before["engine"] == after["engine"]
        assert before["audit_failures"] == 0
    # the trainer adds the ranks' partial products as the engine's all-reduce does; with one product it is at 0.03
    assert all(row["mismatch/logp_difference_mean"] < 1e-5 for row in synced[0]["log"])


def test_each_rank_holds_its_part_of_every_expert_and_replays_the_routes_of_its_own_rollouts(checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe", head_dim=128, moe_intermediate_size=256)
    reports = launch("tensor_parallel_experts", tmp_path, checkpoint=folder, router_replay="rollout")
    assert [report["w13_shape"] for report in reports] == [[4, 256, 128]] * 2  # gate and up of 128 rows each
    assert reports[0]["engine"] != reports[1]["engine"]  # different halves of each expert
    for report in reports:
        assert report["audited"] == report["tensors"] and report["audit_failures"] == 0
        assert all(row["router/disagreement"] == 0 < row["router/own_disagreement"] < 0.4 for row in report["log"])
