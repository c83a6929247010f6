"""On two ranks best models and resumed runs have every weight of a checkpoint, whatever its name is there."""

from pathlib import Path

import pytest

from .ranks import launch


pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

ACCELERATE = Path(__file__).parents[2] / "examples" / "accelerate_configs"
LAUNCHES = {"MULTI_CPU": "cpu_ddp.yaml", "FSDP": "fsdp2.yaml", "DEEPSPEED": "zero3.yaml"}


@pytest.mark.parametrize("kind", LAUNCHES)
def test_experts_come_back(kind, checkpoint, tmp_path):
    flags = {} if kind == "MULTI_CPU" else {"use_cpu": False, "bf16": False}
    config = ACCELERATE / LAUNCHES[kind]
    for report in launch("best_and_resumed", tmp_path, config=config, checkpoint=checkpoint("qwen3_moe"), **flags):
        assert report["distributed_type"] == kind and report["best"].endswith("checkpoint-1")
        assert report["lost"] == report["not resumed"] == report["same"] == [] and report["same_log"]
