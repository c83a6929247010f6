"""One engine over two ranks: each gets its own rows, columns and heads of every tensor."""

import pytest

from .ranks import fork


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

SHAPE = {"head_dim": 128, "intermediate_size": 512}  # 2 KV heads of 128: each rank gets whole blocks


@pytest.fixture(scope="module")
def reports(checkpoint, tmp_path_factory):
    folder = checkpoint("qwen3", **SHAPE)
    experts = checkpoint("qwen3_moe", head_dim=128, moe_intermediate_size=256)
    base = checkpoint("qwen3", **SHAPE, num_key_value_heads=1)  # each rank has a copy of the only one
    mxfp8 = checkpoint("qwen3", intermediate_size=320)  # 160 columns of down_proj: 5 blocks
    checkpoints = {"checkpoint": folder, "experts_checkpoint": experts, "base_checkpoint": base}
    checkpoints["mxfp8_checkpoint"] = mxfp8
    return fork("tensor_parallel", tmp_path_factory.mktemp("tp"), **checkpoints)


def test_a_synced_engine_equals_one_that_loaded_the_checkpoint(reports):
    assert [report["qkv_shape"] for report in reports] == [[512, 128]] * 2  # 2 + 1 + 1 of 4 + 2 + 2 heads
    assert reports[0]["engine"] != reports[1]["engine"]  # different shards
    for report in reports:
        assert report["log_probs"] == report["fresh"]["log_probs"]
        assert report["engine"] == report["fresh"]["engine"]
        assert report["audit_failures"] == 0
    for row in reports[0]["log"]:
        assert row["sampling/survivors_mean"] > 1 and 0 < row["mismatch/logp_difference_mean"] < 0.2
    assert reports[0]["log"][0]["kl"] == 0.0 < reports[0]["log"][1]["kl"]


def test_shards_of_another_format_arrive_in_the_order_of_its_kernel(reports):
    reports = [report["mxfp8"] for report in reports]
    assert [report["down_shape"] for report in reports] == [[128, 160]] * 2
    assert reports[0]["engine"] != reports[1]["engine"]  # different shards
    for report in reports:
        assert report["log_probs"] == report["fresh"]["log_probs"]
        assert report["engine"] == report["fresh"]["engine"]
        assert report["derived"] == 8 and report["audit_failures"] == 0


def test_ranks_of_an_engine_have_equally_many_prompts_or_are_refused(reports):
    for number, report in enumerate(reports):
        assert f"with {number + 1} prompts on this rank, and with 1 to 2 on the ranks" in report["uneven"]


def test_each_rank_holds_its_part_of_every_expert_and_replays_the_routes_of_its_own_rollouts(reports):
    reports = [report["experts"] for report in reports]
    assert [report["w13_shape"] for report in reports] == [[4, 256, 128]] * 2  # gate and up of 128 rows each
    assert reports[0]["engine"] != reports[1]["engine"]  # different halves of each expert
    for report in reports:
        assert report["audited"] == report["tensors"] and report["audit_failures"] == 0
        assert all(row["router/disagreement"] == 0 < row["router/own_disagreement"] < 0.4 for row in report["log"])


def test_ranks_that_share_an_engine_train_adapters_on_a_base_of_their_own(reports):
    reports = [report["base"] for report in reports]
    assert reports[0]["engine"] != reports[1]["engine"] and reports[0]["log_probs"] == reports[1]["log_probs"]
    for report in reports:
        assert report["trained"] and report["wrong"] == [] and report["audit_failures"] == 0
        assert report["codes"] == 14 and report["codes_in_engine"] == 0
        assert len(report["log"]) == 2
