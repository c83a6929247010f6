"""Contexts that undo what vLLM changes in this process when an engine starts.

Once an engine has started, vLLM caches the settings that it read from the environment (`vllm.envs`). So the
environment can be restored, and the engine keeps its settings. `upstream.vllm.forget_choices` clears that cache before
another engine starts. Afterwards the cache has the new engine's settings, and an earlier engine would read these. So
only the last engine of a process may be used.
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


# Environment variables that vLLM sets. vLLM's compiler sets the first two to a cache folder for the engine's model. A
# trainer that compiles would write to that folder, too. vLLM sets the third for some models, and then compiles no
# later engine of this process
SET_BY_VLLM = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_USE_BREAKABLE_CUDAGRAPH"


@contextmanager
def environment_restored(settings: Mapping[str, str] | None = None) -> Iterator[None]:
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
def configs_restored() -> Iterator[None]:
    """Restore transformers' table of config classes after the block.

    For model types like Qwen3-Next vLLM registers its own config classes in that table, for the whole process.
    vLLM's classes lack fields that transformers' models read.
    """
    before = dict(CONFIG_MAPPING._extra_content)
    try:
        yield
    finally:
        CONFIG_MAPPING._extra_content.clear()
        CONFIG_MAPPING._extra_content.update(before)


def policy_class_unchanged(recipe: FP8Recipe) -> AbstractContextManager[None]:
    """Keep engines that start inside the block from changing the policy's class.

    If vLLM has no class of its own for a model, its transformers backend makes an object of transformers' class. To
    compile the object, the backend changes the class itself: the class gets another base class and constructor. A
    policy of this class, which exists already, then lacks attributes of the new base class ("'Olmo2Model' object has
    no attribute 'do_not_compile'"). So inside the block the backend makes its object of a subclass, with the same
    source and modules, and changes only the subclass.
    """
    if not family_of(recipe.model_type).by_transformers:
        return nullcontext()
    from vllm.model_executor.models.transformers import base  # imported here, because no other model needs it

    return substituted(base, "AutoModel", _AutoModelStandIn)


class _AutoModelStandIn:
    """Stand-in for `transformers.AutoModel` that makes objects of subclasses. The backend calls only `from_config`."""

    @staticmethod
    def from_config(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        with set_default_torch_dtype(dtype):
            return _subclass(MODEL_MAPPING[type(config)])(config)


@cache
def _subclass(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of `cls`, always the same one. It has the name and module of `cls`, by which vLLM looks up the
    source of the class.
    """
    return type(cls.__name__, (cls,), {"__module__": cls.__module__})
