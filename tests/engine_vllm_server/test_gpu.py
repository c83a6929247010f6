"""A trainer and a server on one GPU. Run with `pytest -m gpu`.

Written from vLLM's source and not yet run: no GPU was at hand.
"""

import secrets
import subprocess
import sys

import pytest
import torch

from testing.processes import alone, free_port
from testing.runs import SMALL_K3, arguments, dataset, reward_digits, rows
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("transport", ["auto", "cuda_ipc", "broadcast"])
def test_a_trainer_on_a_gpu_trains_against_a_server(transport, checkpoint, tmp_path, monkeypatch):
    """On the same GPU; by NCCL, which takes no two ranks on one, on the last of several."""
    gpus = torch.cuda.device_count()
    if transport == "broadcast" and gpus < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    of_server = {"CUDA_VISIBLE_DEVICES": str(gpus - 1)} if transport == "broadcast" else {}
    monkeypatch.setenv(TOKEN, secrets.token_hex())
    monkeypatch.setenv(FOLDER, str(tmp_path / "transfer"))
    model = checkpoint("qwen3")
    port = str(free_port())
    words = ["serve", model, "--port", port, "--max-model-len", "64", "--max-num-seqs", "8"]
    words += ["--gpu-memory-utilization", "0.2", "--enforce-eager"]
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "trl_fp8.commands.cli", *words], env=alone() | of_server, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        flags = {"use_cpu": False, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 300.0}
        flags["vllm_server_transport"] = transport
        args = arguments(tmp_path / "run", learning_rate=1e-5, **flags)  # small, so that patches bring its steps
        trainer = FP8GRPOTrainer(model, reward_digits, args, dataset())
        assert trainer.vllm_generation.engine.layout.device.type == "cuda"
        trainer.train()
    finally:
        server.terminate()
        server.wait(60)
    assert trainer.vllm_generation.audit_failures == 0
    assert all(0 < row["mismatch/k3_kl"] < SMALL_K3 for row in rows(trainer))
    assert [row["fp8/patch_over_whole"] < 1 for row in rows(trainer)] == [False, True, True]
