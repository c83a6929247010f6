"""Policies sharded by FSDP2 and ZeRO-3 over two ranks, under the accelerate configurations that users launch with:
against engines of the ranks, and against servers.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from testing import engines, forked_server
from testing.runs import SMALL_K3
from trl_fp8.engine.vllm_server.plugin import TOKEN
from trl_fp8.quantization.codec.kv_scales import KVScales

from .ranks import fork


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

ACCELERATE = Path(__file__).parents[2] / "examples" / "accelerate_configs"
SHARDED = {"FSDP": ACCELERATE / "fsdp2.yaml", "DEEPSPEED": ACCELERATE / "zero3.yaml"}
# accelerate takes FSDP and DeepSpeed for GPU matters (see worker.shard_on_cpu), and TRL takes bf16 for one, too
# Shards of q, k, v, gate and up are whole blocks, of others not; DeepSpeed keeps what has less than 1e5 numbers on all
# ranks besides
SHAPE = {"head_dim": 128, "intermediate_size": 1024}
SERVED = {"blocks": SHAPE, "mxfp8": {"intermediate_size": 224}}  # format of a server's weights -> shape
FLAGS = dict(use_cpu=False, bf16=False, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4, beta=0.04)


@pytest.fixture(scope="module")
def servers(checkpoint, tmp_path_factory):
    """A server by the format of its weights, forked before this process has an engine."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as running, pytest.MonkeyPatch.context() as patched:
        patched.setenv(TOKEN, forked_server.TOKEN)
        found = {}
        for name, shape in SERVED.items():
            server = forked_server.running(checkpoint("qwen3", **shape), folder / name, weight_format=name)
            found[name] = running.enter_context(server)
        yield found


@pytest.fixture(scope="module", params=SHARDED)
def reports(request, servers, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    flags = FLAGS | {"fp8_forward": "one_forward", "kv_calibration": "policy"}
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    flags |= {"lora": lora, "lora_flags": FLAGS | {"fp8_forward": "one_forward", "learning_rate": 0.01}}
    if request.param == "FSDP":  # under ZeRO-3 refused
        flags |= {"base_flags": flags["lora_flags"] | {"max_steps": 2}, "asynchronous": True}
        served = servers
    else:
        served = {"blocks": servers["blocks"]}
    flags["served"] = []
    for name, server in served.items():
        options = {"checkpoint": server.model, "url": server.url, "transfer": server.folder, "fp8_weight_format": name}
        flags["served"].append(options)
    flags |= {"checkpoint": checkpoint("qwen3", **SHAPE), "mixture": checkpoint("qwen3_moe")}
    made = fork("train_and_lora", folder, config=SHARDED[request.param], **flags)
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
    assert rows[0]["kl"] == 0.0 < rows[1]["kl"]  # the reference is dealt over the ranks, too
    # evaluation is a forward without a backward: FSDP2 leaves parameters unsharded there, and the next sync reads them
    assert reports[0]["evaluated"]


def test_an_export_holds_what_a_sync_sends(reports):
    assert [report["export"] for report in reports] == [[], None]


def test_a_synced_engine_equals_one_that_loads_the_export(reports):
    for report in reports:
        assert report["fresh"]["engine"] == report["engine"]
        assert report["fresh"]["log_probs"] == report["log_probs"]


def test_weights_are_gathered_as_the_engine_holds_them(reports):
    """Each in one gather, or as codes and scales in two; none in the FP32 of the policy."""
    layers, hidden, vocabulary = 2, 128, 64
    by_codes = [rows * hidden for rows in (512, 256, 256, 1024, 1024)]  # q, k, v, gate, up
    rounded = [hidden * 512, hidden * 1024, hidden, hidden, 128, 128]  # o, down, norms of the layer, of q and k
    once = [vocabulary * hidden, vocabulary * hidden, hidden]  # embedding, head, last norm
    expected = [*by_codes, *(numbers // 128**2 * 4 for numbers in by_codes), *(2 * numbers for numbers in rounded)]
    for report in reports:
        assert report["full_tensors"] == 0
        assert sorted(report["gathered_bytes"]) == sorted([*expected * layers, *(2 * numbers for numbers in once)])


def test_the_callback_compares_a_sharded_policy_with_its_engine(reports):
    first, second = (report["sync_audit"] for report in reports)
    for report in (first, second):
        assert report["healthy"] == [] and report["tensors"] > 30 and report["tied"] == [False, True]
    assert [line.split()[0] for line in first["wrong"]] == ["model.norm.weight"] and second["wrong"] == []


def test_a_rank_without_memory_fails_the_sync_on_all_ranks_and_the_next_one_succeeds(reports):
    first, second = (report["failures"] for report in reports)
    refused = "the engine holds no complete policy"
    assert [said.partition(":")[0] for said in second["said"]] == ["no memory for another tensor", refused] * 3 + [""]
    others = "weight sync failed on another rank, whose log says why."
    assert [said.partition(":")[0] for said in first["said"]] == [others, refused] * 3 + [""]
    assert first["engine"] == second["engine"] == reports[0]["engine"]
    assert first["audit_failures"] == second["audit_failures"] == 0


def test_lora_on_a_sharded_policy(reports):
    first, second = (report["lora"] for report in reports)
    assert first["distributed_type"] == reports[0]["distributed_type"]
    assert first["engine"] == second["engine"] != reports[0]["engine"] and first["log_probs"] == second["log_probs"]
    if first["distributed_type"] == "FSDP":  # the one that is quantized and the one that is being gathered
        assert first["full_tensors"] > 50 and first["most_gathered"] <= 2
        assert len(first["gathered_bytes"]) == 2 * 16 + 2  # the reference's, once: all but the embedding
    rows = first["log"]
    assert len(rows) == 3 and all(row["mismatch/logp_difference_mean"] < 1e-5 for row in rows)
    assert rows[0]["kl"] == 0.0 < rows[1]["kl"]


def test_adapters_on_a_shared_base_under_fsdp2(reports):
    first, second = (report.get("base") for report in reports)
    if reports[0]["distributed_type"] != "FSDP":
        assert first is second is None
        return
    assert first["distributed_type"] == second["distributed_type"] == "FSDP"
    assert first["engine"] == second["engine"] and first["log_probs"] == second["log_probs"]
    assert len(first["log"]) == 2 and all(row["mismatch/logp_difference_mean"] < 1e-5 for row in first["log"])
    assert first["log"][0]["kl"] == 0.0 < first["log"][1]["kl"]
    for report in (first, second):
        assert report["trained"] and report["wrong"] == [] and report["audit_failures"] == 0
        assert report["codes_in_engine"] == report["codes"] == 14  # the seven linears of two layers
        # what is left in a policy: adapters, embedding, head, and norms of hidden states, q and k
        assert set(report["parameters"].values()) == {"DTensor"} and len(report["parameters"]) == 16 + 2 + 9
        assert report["audited"] == 2 * 6 * 2  # A and B of all but o, k and gate being fused with what has adapters
    other = "weight sync failed on another rank, whose log says why."
    assert first["said"] == [other] * 2 and second["said"] == ["no memory for an adapter"] * 2


def test_the_server_of_a_sharded_policy_computes_as_an_engine_of_the_saved_one(reports, servers):
    assert len(reports[0]["served"]) == (2 if reports[0]["distributed_type"] == "FSDP" else 1)
    for name, first, second in zip(servers, reports[0]["served"], reports[1]["served"], strict=False):
        for report in (first, second):
            assert report["audit_failures"] == 0 and report["full_tensors"] == 0
            assert len(report["log"]) == 2 and all(0 < row["mismatch/k3_kl"] < SMALL_K3 for row in report["log"])
        colocated = engines.start(first["saved"], KVScales(torch.tensor(first["kv_scales"])), weight_format=name)
        try:
            colocated.sync_weights()
            for tokens in engines.PROMPTS:
                assert servers[name].log_probs(tokens) == colocated.llm.log_probs(tokens).tolist()
        finally:
            engines.shutdown(colocated.llm)


def test_every_weight_of_a_mixture_comes_back_from_its_checkpoint(reports):
    """Into the best model and into a resumed run, whatever its name is in the file."""
    for report in (report["mixture"] for report in reports):
        assert report["best"].endswith("checkpoint-1")
        assert report["lost"] == report["not resumed"] == report["same"] == [] and report["same_log"]


def test_an_asynchronous_trainer_under_fsdp2_sends_what_its_shards_hold(reports):
    found = [report.get("asynchronous") for report in reports]
    if reports[0]["distributed_type"] != "FSDP":  # under ZeRO-3 refused
        assert found == [None, None]
        return
    for report in found:
        assert report["distributed_type"] == "FSDP" and report["parameters"] == ["DTensor"]
        assert report["wrong"] == [] and report["staged"] > 30 and report["audit_failures"] == 0
        assert report["model_version"] == 4
        assert all(report[name] == found[0][name] for name in ("policy", "kv_scales"))
    rows = found[0]["log"]
    assert [row["staleness/age_max"] for row in rows] == [0, 1, 1] and all(row["grad_norm"] > 0 for row in rows)
    assert 0 < rows[0]["mismatch/k3_kl"] < SMALL_K3
