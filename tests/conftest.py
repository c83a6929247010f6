"""Settings and fixtures of every test: no network, quiet engines, tiny checkpoints."""

import gc
import os
from functools import cache

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from testing.processes import RANKS, free_port


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# engines of two workers, or of two runs, must not listen on one port
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
# The same examples in every run: what fails is this commit's. Hypothesis also draws numbers and texts that it finds in
# the sources of imported modules, and which ones are imported depends on the tests that ran before in this process
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
if hasattr(providers, "_get_local_constants"):  # Hypothesis 6.131 and later
    providers._get_local_constants = lambda: providers._local_constants  # as it is before modules are read: empty
freeze, unfreeze = gc.freeze, gc.unfreeze
gc.freeze = gc.unfreeze = lambda: None  # vLLM's calls, once for each engine, would undo `settled_heap`


@pytest.fixture(autouse=True)
def settled_heap(request):
    """Hide objects older than a test of engines, most of them imported code, from the garbage collector.

    vLLM looks through the whole heap twice for each engine that starts and three times for each that ends: 2 of 3
    seconds of an engine's life.
    """
    if request.node.get_closest_marker("engine"):
        bind_kernels_once()
        gc.collect()
        freeze()


@cache
def bind_kernels_once() -> None:
    """Let only the first engine of this process look for vLLM's kernels in all modules: 0.4 s for each that starts."""
    from vllm.triton_utils import dispatcher

    bind = dispatcher._rebind_kernels

    def bind_new(overrides) -> None:
        new = [each for each in overrides if not isinstance(each[0], dispatcher.KernelOverride)]
        if new:
            bind(new)

    dispatcher._rebind_kernels = bind_new


@pytest.fixture(autouse=True)
def no_rank():
    """Remove an engine's rank from the environment after each test: a later test's config would form a group.

    Also remove the variable that vLLM sets with some models' configs: later engines would not be compiled.
    """
    yield
    for name in (*RANKS, "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        os.environ.pop(name, None)


@pytest.fixture(scope="module", autouse=True)
def thawed_heap():
    """Let the garbage collector free a module's fixtures after the module."""
    yield
    unfreeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a function: `checkpoint("qwen3", tied=True)` returns a tiny checkpoint, written once a session."""
    from testing import tiny_models  # not above: the process that hands tests to workers needs no torch

    folders = {}

    def make(architecture: str = "qwen3", **options) -> str:
        key = (architecture, repr(sorted(options.items())))  # some are lists
        if key not in folders:
            folders[key] = tiny_models.save_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **options)
        return folders[key]

    return make
