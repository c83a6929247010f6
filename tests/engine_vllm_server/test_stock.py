"""A server of vLLM's own, which this package is installed beside and does not take part in."""

import os
from pathlib import Path

import httpx
import pytest
import vllm.model_executor.kernels.linear as linear_kernels
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from testing import forked_server
from trl_fp8.engine.vllm_server import plugin


pytestmark = pytest.mark.engine
WORDS = ["--max-model-len", "64", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**26), "--dtype", "bfloat16"]
WORDS += ["--distributed-executor-backend", "uni", "--enforce-eager"]


def registries() -> tuple:
    """Return what the plugin of an FP8 server changes in vLLM."""
    kernels = {kind: list(found) for kind, found in linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS.items()}
    return set(WeightTransferEngineFactory._registry), kernels, AttentionBackendEnum.CPU_ATTN.get_path()


def register_unused(before: Path, after: Path) -> None:
    """Do in a server's process what vLLM does with each plugin, and note its registries."""
    os.environ.pop(plugin.SWITCH, None)
    before.write_text(repr(registries()))
    plugin.register()
    after.write_text(repr(registries()))


def seen_by_a_client(server: forked_server.ForkedServer) -> dict:
    """Return endpoints and answers. Nothing is generated: vLLM's own kernels end on some CPUs by SIGILL."""
    calls = ("tokenize", "pause?mode=keep", "resume", "collective_rpc", "start_weight_update", "v1/load_lora_adapter")
    with httpx.Client(base_url=server.url, timeout=120) as client:
        paths = client.get("/openapi.json").json()["paths"]
        answers = {call: client.post(f"/{call}", json={"prompt": "1+2="}) for call in calls}
        assert answers["tokenize"].status_code == 200, answers["tokenize"].text
        return {
            "endpoints": {path: sorted(methods) for path, methods in paths.items()},
            "answers": {call: (answer.status_code, answer.text) for call, answer in answers.items()},
        }


def test_a_stock_server_beside_which_the_package_is_installed_behaves_as_without_it(checkpoint, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    plants = {"without": lambda: None, "with": lambda: register_unused(before, after)}
    seen = {}
    for name, plant in plants.items():
        start = forked_server.fork
        options = {"words": WORDS, "environment": {"TORCHDYNAMO_DISABLE": "1"}, "plant": plant}
        with forked_server.running(checkpoint("qwen3"), tmp_path / name, start, **options) as server:
            seen[name] = seen_by_a_client(server)
    assert seen["with"] == seen["without"]
    assert before.read_text() == after.read_text()
