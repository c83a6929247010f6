"""`Platform`: what vLLM is told wherever it runs, and what CPU and CUDA add to that.

The engine starts from dummy weights with the recipe's `quantization_config` in the model's config: TRL syncs the whole
policy before the first rollout. Kernels and attention backend are pinned, because vLLM's own choice depends on the
batch size (FlashInfer below 32 rows, DeepGEMM above) and takes some whose weights or scales could not be written in
place. Those of linears are chosen by what they do on the device (gemms.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from transformers import PretrainedConfig

from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.recipe import FP8Recipe

from .compiled import traced
from .part import EnginePart


class Platform(ABC):
    """Where an engine runs."""

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
        """What to pass to `LLM(...)` over what TRL passes; `ValueError` if the platform cannot run such a recipe.

        Args:
            recipe, config: The policy's.
            max_num_seqs, max_model_len: As TRL sets them; None means the model's own context length.
            parts: What features add, see `EnginePart.arguments`.
            user: `vllm_engine_kwargs`; they win over what is pinned, setting by setting.
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
        arguments |= self._arguments(recipe, config.get_text_config(), max_num_seqs, max_model_len)
        for part in parts:
            arguments = _merged(arguments, part.arguments(self, recipe, config, user))
        return _merged(arguments, user)

    @abstractmethod
    def ready(self, recipe: FP8Recipe) -> AbstractContextManager[None]:
        """Engines that are started inside the block find what they need."""

    @abstractmethod
    def _arguments(self, recipe: FP8Recipe, config: PretrainedConfig, seqs: int, length: int | None) -> dict: ...


def _merged(ours: dict, further: dict) -> dict:
    """Settings over ours; a dictionary within does not replace ours as a whole."""
    both = [name for name in ours.keys() & further if isinstance(ours[name], dict) and isinstance(further[name], dict)]
    return ours | further | {name: _merged(ours[name], further[name]) for name in both}
