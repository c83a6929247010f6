"""Undoes what vLLM changes in this process when an engine starts.

Once an engine has started, vLLM caches the settings it read (`vllm.envs`). So the engine keeps them, and the
environment can be put back. The next engine reads the environment anew (`forget_choices`), and from then on earlier
engines have that one's settings, too: only the last engine of a process may be used.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from vllm.utils.torch_utils import set_default_torch_dtype

from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.patches import substituted


# vLLM's compiler points the first two at the folder of its model: a trainer that compiles would write there, too. It
# sets the last one for some models, after which no engine of this process would be compiled
SET_BY_VLLM = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_USE_BREAKABLE_CUDAGRAPH"


@contextmanager
def environment_kept(settings: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set `settings` in the environment inside the block; restore them and `SET_BY_VLLM` afterwards."""
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
    """Restore transformers' table of configs after the block. vLLM registers its own for types like Qwen3-Next, for
    the whole process, and they lack fields that transformers' models read.
    """
    before = dict(CONFIG_MAPPING._extra_content)
    try:
        yield
    finally:
        CONFIG_MAPPING._extra_content.clear()
        CONFIG_MAPPING._extra_content.update(before)


def classes_derived(recipe: FP8Recipe) -> AbstractContextManager[None]:
    """Keep engines that start inside the block from changing the policy's class.

    For a model without a vLLM class, the transformers backend builds transformers' own, and gives that class another
    base and constructor, so that it can be compiled. An existing policy of the class then lacks what the new base
    expects ("'Olmo2Model' object has no attribute 'do_not_compile'"). So the backend gets a class that is derived from
    transformers', with the same source and modules.
    """
    if not family_of(recipe.model_type).by_transformers:
        return nullcontext()
    from vllm.model_executor.models.transformers import base  # no other model needs it

    return substituted(base, "AutoModel", _Derived)


class _Derived:
    """Stands in for `transformers.AutoModel`, of which the backend calls only `from_config`."""

    @staticmethod
    def from_config(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        with set_default_torch_dtype(dtype):
            return _derived(MODEL_MAPPING[type(config)])(config)


@cache
def _derived(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    return type(cls.__name__, (cls,), {"__module__": cls.__module__})
