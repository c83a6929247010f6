"""`Platform`: what vLLM is told wherever it runs, and what CPU and CUDA add to that.

The engine starts from dummy weights with the recipe's `quantization_config` in the model's config: TRL syncs the whole
policy before the first rollout. Kernels and attention backend are pinned, because vLLM's own choice takes some whose
weights or scales could not be written in place. Those of linears are chosen by what they do on the device (gemms.py).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import ClassVar

from transformers import PretrainedConfig

from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.vllm import forget_choices

from .environment import classes_derived, configs_kept, environment_kept
from .part import EnginePart


ENTRY = "trl_fp8"  # of vLLM's `additional_config`


class Platform(ABC):
    """A kind of device that an engine runs on."""

    name: ClassVar[str]  # as torch calls the device

    @abstractmethod
    def linear_backends(self, recipe: FP8Recipe) -> tuple[str, ...]:
        """vLLM's kernels for FP8 linears that may be taken, see `gemms.pinned_gemm`."""

    def arguments(
        self,
        recipe: FP8Recipe,
        config: PretrainedConfig,
        *,
        max_num_seqs: int,
        max_model_len: int | None,
        parts: Sequence[EnginePart] = (),
        user: dict | None = None,
    ) -> dict:
        """Return arguments of `LLM(...)` that override TRL's; `ValueError` if the platform cannot run such a recipe.

        `recipe` and `config` are the policy's, `max_num_seqs` and `max_model_len` as TRL sets them; None is the
        model's own context length. `user`: `vllm_engine_kwargs`, which win over what is pinned, setting by setting.
        """
        user, arguments = user or {}, {"load_format": "dummy", "dtype": "bfloat16"}
        arguments["additional_config"] = traced()
        # Of what vLLM would normalize images with, dummy weights are made; the trainer's processor normalizes, too
        arguments["mm_device_do_normalize"] = False
        # also where nothing is FP8: the folder's config may say how its own weights are quantized
        text = config.get_text_config()
        fields = family_of(text.model_type).engine_fields(text.to_dict())
        arguments["hf_overrides"] = fields | {"quantization_config": recipe.quantization_config}
        if recipe.quantization_config is not None:
            arguments["kv_cache_dtype"] = recipe.kv_cache_dtype
        if recipe.kv_cache_skip_layers:
            arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in recipe.kv_cache_skip_layers]
        arguments |= self._arguments(recipe, text, max_num_seqs, max_model_len)
        for part in parts:
            arguments = _merged(arguments, part.arguments(self, recipe, config, user))
        return _merged(arguments, user)

    @contextmanager
    def ready(self, recipe: FP8Recipe) -> Iterator[None]:
        """Engines that are started inside the block find what they need."""
        forget_choices()
        with environment_kept(), configs_kept(), classes_derived(recipe), self._kernels_ready():
            yield

    @abstractmethod
    def _kernels_ready(self) -> AbstractContextManager[None]:
        """Inside the block engines find the platform's kernels."""

    @abstractmethod
    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict: ...


def _merged(ours: dict, further: dict) -> dict:
    """Settings over ours; a dictionary within does not replace ours as a whole."""
    both = [name for name in ours.keys() & further if isinstance(ours[name], dict) and isinstance(further[name], dict)]
    return ours | further | {name: _merged(ours[name], further[name]) for name in both}


def traced(**further: object) -> dict[str, dict]:
    """`additional_config` for `vllm.LLM(...)`; `further`: what else of this run the traced code depends on.

    vLLM looks for compiled code under a hash of its environment variables, its config and the model's class, and does
    not trace the model again where it finds some. Kernels and layers of ours that are registered in place of vLLM's
    change what is traced and stand in none of these. `additional_config` is hashed, and nobody reads this entry. A
    part that changes what is traced adds to it.
    """
    return {ENTRY: {"source": _source(), **further}}


@cache
def _source() -> str:
    """Digest of this package: another version of it, or an edited one, may trace something else."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
