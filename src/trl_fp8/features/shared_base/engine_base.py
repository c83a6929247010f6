"""The FP8 base of a policy in an engine: handed over once, with room for adapters, which alone each sync sends."""

from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, closing
from functools import cached_property
from itertools import chain

from torch import nn
from transformers import PretrainedConfig

from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.engine.vllm.layout import held_codes
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.platform import Platform, traced
from trl_fp8.engine.vllm.policy_weights import PolicyWeights
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import Part
from trl_fp8.sync.writer import Named, Sent
from trl_fp8.upstream import vllm as upstream

from .adapter_tensors import adapter_tensors, factors, merged, room_for
from .engine_adapters import adapters_installed, slots_of
from .engine_unread import TOKENS, stale, unread_adapters
from .held_base import SharedBase


class BasePart(EnginePart):
    """The engine keeps the base, and the policy's layers compute with its codes, also while it sleeps."""

    def __init__(self, base: SharedBase):
        self.base = base
        self._adapters_read = True  # False: a compiled engine's have not been tried yet

    @cached_property
    def _room(self) -> dict[str, int]:
        return room_for(self.base.model)

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        # A model gets its layers of adapters after vLLM made it, so that vLLM's own hash of it does not know them
        return {"additional_config": traced(adapters=self._room)}

    def starting(self, platform: Platform, recipe: FP8Recipe) -> AbstractContextManager:
        return adapters_installed(recipe, self._room)

    def started(self, generation: FP8VLLMGeneration) -> None:
        generation.llm.share_weights()

    def weights(self, generation: FP8VLLMGeneration) -> PolicyWeights:
        return AdapterWeights(generation, self.base)

    def ready(self, generation: FP8VLLMGeneration) -> None:
        recipe, layout = generation.recipe, generation.engine.layout
        generation.wake_weights()
        generation.delivery.send(generation.weights.frozen[0])
        self.base.share(lambda weight: held_codes(layout, recipe.engine_name(weight), recipe.format))
        # The first sync of a compiled engine tries its adapters: now weights are random
        self._adapters_read = not upstream.engine_config(generation.llm).compilation_config.mode

    def synced(self, generation: FP8VLLMGeneration) -> None:
        if self._adapters_read:
            return
        with generation.cache_awake():
            unread = unread_adapters(generation.engine.model, lambda: generation.llm.log_probs(TOKENS))
            generation.engine.reset_prefix_cache()
        [found] = generation.largest([len(unread)])
        if found:
            raise stale(unread)
        self._adapters_read = True


class AdapterWeights(PolicyWeights):
    """Adapters, and what else of the policy is trained beside a frozen base."""

    def __init__(self, generation: FP8VLLMGeneration, base: SharedBase):
        super().__init__(generation)
        self.base, recipe = base, self.recipe
        self.slots = {recipe.linears[name]: slot for name, slot in slots_of(generation.engine.model).items()}
        codes = {name for w in recipe.fp8_tensors for name in (recipe.engine_name(w), recipe.scale_name(w))}
        kept = {recipe.engine_name(name) for name, parameter in self.parameters() if not parameter.requires_grad}

        def kept_tensors() -> AbstractContextManager[Iterator[Sent]]:
            return closing(self.whole(lambda: (p for p in self.parameters() if recipe.engine_name(p[0]) in kept)))

        base_part = Part(self.layout.part(codes), lambda: closing(base.tensors()), at_once=True)
        self.frozen = base_part, Part(self.layout.part(kept), kept_tensors, at_once=self.dealt)

    def at_once(self, model: nn.Module) -> bool:
        return self.dealt  # nothing is merged

    def sent(self) -> AbstractContextManager[Iterator[Sent]]:
        named = self.model.named_parameters
        trained = self.whole(lambda: (each for each in named() if each[1].requires_grad or ".lora_" in each[0]))
        return closing(adapter_tensors(self.model, self.slots, trained))

    def merged(self) -> AbstractContextManager[Iterator[Named]]:
        return closing(self._merged())

    def _merged(self) -> Iterator[Named]:
        adapters = factors(self.model, self._adapters(self.model))
        yield from merged(self.whole(self.parameters), adapters)
        if self._generation.accelerator.is_main_process:
            yield from merged(self.base.originals(), adapters)

    def reference(self, model: nn.Module, names: Set[str]) -> AbstractContextManager[Iterator[Sent]]:
        own = self._reference(model, names, summed=False)
        sent = adapter_tensors(model, self.slots, chain(self._adapters(model), own))
        return closing((name, tensor) for name, tensor in sent if self.recipe.engine_name(name) in names)

    def _adapters(self, model: nn.Module) -> Iterator[Named]:
        return self.whole(lambda: (each for each in model.named_parameters() if ".lora_" in each[0]))
