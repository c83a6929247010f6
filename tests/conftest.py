"""What every test needs: no network, quiet engines, tiny checkpoints."""

import os
import socket
import sys
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # engines of two workers must not listen on one port
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import tiny_models  # noqa: E402


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint("qwen3", tied=True)` -> folder of a tiny checkpoint, made once per session and arguments."""
    made = {}

    def make(architecture: str = "qwen3", **options) -> str:
        key = (architecture, *sorted(options.items()))
        if key not in made:
            made[key] = tiny_models.save_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **options)
        return made[key]

    return make
