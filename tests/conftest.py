"""What every test needs: no network, quiet engines, tiny checkpoints."""

import gc
import os
import socket


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # engines of two workers must not listen on one port
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))

import pytest  # noqa: E402

from testing import tiny_models  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def settled_heap():
    """Take what is there before a module of tests, all of it imported code, out of the garbage collector's sight.

    vLLM looks through the whole heap twice for each engine that starts and three times for each that
    ends: 2 of 3 seconds of an engine's life. It also freezes the heap while an engine is alive and
    unfreezes it then, which would undo this.
    """
    freeze, unfreeze = gc.freeze, gc.unfreeze
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    yield
    gc.freeze, gc.unfreeze = freeze, unfreeze


def pytest_unconfigure():
    gc.unfreeze()  # or modules complain at exit about what was not freed


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
