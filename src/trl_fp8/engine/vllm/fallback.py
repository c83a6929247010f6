"""vLLM's transformers backend, without a change to the classes that the trainer's models are of.

For a model that vLLM has no class of, the backend builds transformers' own, and gives that class another base and
constructor, so that it can be compiled. A policy of the class, which was made before, then has none of what the new
base expects ("'Olmo2Model' object has no attribute 'do_not_compile'"). So the backend gets a class that is derived
from transformers', whose source and modules it shares.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from vllm.utils.torch_utils import set_default_torch_dtype

from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.patches import substituted


def classes_derived(recipe: FP8Recipe) -> AbstractContextManager[None]:
    """Engines that are made inside the block leave the policy's class as it is."""
    if not family_of(recipe.model_type).by_transformers:
        return nullcontext()
    from vllm.model_executor.models.transformers import base  # no other model needs it

    return substituted(base, "AutoModel", _Derived)


class _Derived:
    """In the place of `transformers.AutoModel`, of which the backend calls nothing else."""

    @staticmethod
    def from_config(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        with set_default_torch_dtype(dtype):
            return _derived(MODEL_MAPPING[type(config)])(config)


@cache
def _derived(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    return type(cls.__name__, (cls,), {"__module__": cls.__module__})
