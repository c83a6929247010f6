"""Policies that FSDP2 and ZeRO-3 shard over two ranks, against one server."""

from pathlib import Path

import pytest
import requests
import torch

from testing import engines, forked_server
from testing.runs import SMALL_K3
from tests.distributed.ranks import launch
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN
from trl_fp8.quantization.codec.kv_scales import KVScales


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

ACCELERATE = Path(__file__).parents[2] / "examples" / "accelerate_configs"
SHAPE = {"head_dim": 128, "intermediate_size": 1024}


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "transfer"
    with forked_server.running(checkpoint("qwen3", **SHAPE), folder, kv_cache_dtype="fp8") as running:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(FOLDER, running.folder)
            patched.setenv(TOKEN, running.token)
            yield running


def log_probs(server, tokens):
    request = {"model": server.model, "prompt": [tokens], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
    answer = requests.post(f"{server.url}/v1/completions", json=request)
    answer.raise_for_status()
    [choice] = answer.json()["choices"]
    pairs = zip(choice["prompt_logprobs"][1:], tokens[1:], strict=True)
    return [row[str(token)]["logprob"] for row, token in pairs]


# With "copied" ranks write to memory of their own, as on GPUs, and the first one copies it to the file
@pytest.mark.parametrize("config, copied", [("fsdp2.yaml", True), ("zero3.yaml", False)])
def test_the_server_of_a_sharded_policy_computes_as_an_engine_of_the_saved_one(config, copied, server, tmp_path):
    flags = {"use_cpu": False, "bf16": False, "max_steps": 2, "kv_calibration": "policy"}
    flags |= {"checkpoint": server.model, "vllm_server_base_url": server.url, "copied": copied}
    reports = launch("train_against_a_server", tmp_path, config=ACCELERATE / config, **flags)
    for report in reports:
        assert report["audit_failures"] == 0 and report["full_tensors"] == 0
        assert len(report["log"]) == 2 and all(0 < row["mismatch/k3_kl"] < SMALL_K3 for row in report["log"])
    scales = KVScales(torch.tensor(reports[0]["kv_scales"]))
    colocated = engines.start(reports[0]["saved"], scales)
    try:
        colocated.sync_weights()
        for tokens in engines.PROMPTS:
            assert log_probs(server, tokens) == colocated.llm.log_probs(tokens).tolist()
    finally:
        engines.shutdown(colocated.llm)
