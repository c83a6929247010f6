"""The environment of this process around an engine's start: what vLLM sets in it does not stay.

vLLM keeps its settings (`vllm.envs`) from the end of a start on. So an engine has them for as long as it lives, and
the environment can be what it was before. The next engine reads it anew (`forget_choices`), and from then on
an engine from before has its settings, too: only the last engine of a process may be used.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from transformers import CONFIG_MAPPING


# vLLM's compiler points the first two at the folder of its model: a trainer that compiles would write there, too. The
# last one it sets for some models, and no engine after them in this process would be compiled
SET_BY_VLLM = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_USE_BREAKABLE_CUDAGRAPH"


@contextmanager
def environment_kept(settings: Mapping[str, str] | None = None) -> Iterator[None]:
    """Inside the block the environment has `settings`; after it they, and `SET_BY_VLLM`, are what they were before."""
    settings = settings or {}
    before = {name: os.environ.get(name) for name in (*SET_BY_VLLM, *settings)}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def configs_kept() -> Iterator[None]:
    """After the block transformers makes configs as it did before. vLLM registers its own for types like Qwen3-Next,
    for the whole process, and they lack fields that transformers' models ask for.
    """
    before = dict(CONFIG_MAPPING._extra_content)
    try:
        yield
    finally:
        CONFIG_MAPPING._extra_content.clear()
        CONFIG_MAPPING._extra_content.update(before)
