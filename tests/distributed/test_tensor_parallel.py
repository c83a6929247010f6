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
