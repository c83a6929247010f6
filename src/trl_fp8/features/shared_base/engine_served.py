"""LoRA on an FP8 base that a server holds: its workers add adapter layers, and the trainer sends the base once.

trl-fp8 serve --lora    `ServedAdapters` decides which layers get adapters and passes them to the workers in an
                        environment variable
worker                  `register` adds the adapter layers to the model, as a colocated engine does
trainer                 `ServedBase` compares these layers with the policy's adapters, and sends the base with the
                        first sync; later syncs send only adapters. The policy computes with the codes that were sent
"""

import json
import os
from contextlib import ExitStack

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PretrainedConfig

from trl_fp8.engine.vllm.colocated import Delivered
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.platform import Platform, compile_cache_key
from trl_fp8.engine.vllm_server.plugin import EXTENSION
from trl_fp8.recipe.recipe import FP8Recipe

from .adaptable import require_adaptable
from .adapter_tensors import adapter_ranks
from .engine_adapters import adapters_installed
from .engine_base import AdapterWeights, BasePart
from .server_slots import slots_from


ADAPTERS_VARIABLE = "TRL_FP8_ADAPTERS"  # environment variable: arguments of `adapters_installed` as JSON
_UNTIL_PROCESS_ENDS = ExitStack()  # contexts that are never left


def register() -> None:
    """Add adapter layers to the models that this process of a server builds."""
    _UNTIL_PROCESS_ENDS.enter_context(adapters_installed(**json.loads(os.environ[ADAPTERS_VARIABLE])))


class ServedAdapters(EnginePart):
    """Engine part (engine/vllm/part.py) of a server whose workers add adapter layers.

    Args:
        lora: Arguments of PEFT's `LoraConfig` as JSON.
    """

    def __init__(self, lora: str):
        try:
            self._lora = LoraConfig(task_type="CAUSAL_LM", **json.loads(lora))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"--lora {lora!r}: {error}. Give arguments of PEFT's LoraConfig as JSON, such as "
                """'{"r": 32, "target_modules": "all-linear"}'."""
            ) from error

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        return {"additional_config": compile_cache_key(adapters=self._ranks(recipe, config))}

    def environment(self, recipe: FP8Recipe, config: PretrainedConfig) -> dict[str, str]:
        arguments = {"linears": [*recipe.linears], "ranks": self._ranks(recipe, config)}
        # The processes of the server import this module and call its `register` (plugin.py)
        return {EXTENSION: __name__, ADAPTERS_VARIABLE: json.dumps(arguments)}

    def _ranks(self, recipe: FP8Recipe, config: PretrainedConfig) -> dict[str, int]:
        """Return the rank of each layer with an adapter, by the layer's name in the engine."""
        try:
            with torch.device("meta"):
                model = get_peft_model(AutoModelForCausalLM.from_config(config), self._lora)
            require_adaptable(model, recipe)
        except ValueError as error:  # its message speaks of fp8_base, a flag of trainers
            raise ValueError(
                f"--lora: a server has no room for these adapters ({error}) Name other layers in target_modules, or "
                "leave --lora out."
            ) from error
        return {recipe.engine_name(layer): rank for layer, rank in adapter_ranks(model).items()}


class ServedBase(BasePart):
    """Engine part of a trainer whose server holds the base."""

    def weights(self, generation: Delivered) -> AdapterWeights:
        facts = generation.engine.added  # what the server said of the adapter layers that its workers added
        return AdapterWeights(generation, self.base, slots_from(facts))

    def staged(self, generation: Delivered) -> None:
        """Stage the base for the first sync, and let the policy's layers compute with the staged codes."""
        self._share(generation)
