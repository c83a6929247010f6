"""What every test needs: no network, quiet engines, tiny checkpoints."""

import gc
import os

import pytest
from hypothesis import settings

from testing.processes import RANKS, free_port


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# engines of two workers, or of two runs, must not listen on one port
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
# the same examples in every run: what fails is this commit's
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
freeze, unfreeze = gc.freeze, gc.unfreeze
gc.freeze = gc.unfreeze = lambda: None  # vLLM's calls, once for each engine, would undo `settled_heap`


@pytest.fixture(autouse=True)
def settled_heap(request):
    """Take what is there before a test of engines, most of it imported code, out of the garbage collector's sight.

    vLLM looks through the whole heap twice for each engine that starts and three times for each that ends: 2 of 3
    seconds of an engine's life.
    """
    if request.node.get_closest_marker("engine"):
        gc.collect()
        freeze()


@pytest.fixture(autouse=True)
def no_rank():
    """After a test this process is no rank of an engine: a config that a later test makes would form a group.

    Nor has it what vLLM sets for some models when it makes their configs: later engines would not be compiled.
    """
    yield
    for name in (*RANKS, "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        os.environ.pop(name, None)


@pytest.fixture(scope="module", autouse=True)
def thawed_heap():
    """What a module's own fixtures held can be freed after it."""
    yield
    unfreeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint("qwen3", tied=True)` -> folder of a tiny checkpoint, made once per session and arguments."""
    from testing import tiny_models  # not above: the process that hands tests to workers needs no torch

    made = {}

    def make(architecture: str = "qwen3", **options) -> str:
        key = (architecture, repr(sorted(options.items())))  # some are lists
        if key not in made:
            made[key] = tiny_models.save_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **options)
        return made[key]

    return make
