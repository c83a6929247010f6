"""The FP8 base of a policy in an engine: sent once, with room for adapters; each sync sends only adapters."""

import re
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, closing
from functools import cached_property
from itertools import chain

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm import envs

from trl_fp8.engine.vllm.colocated import Generation
from trl_fp8.engine.vllm.layout import held_codes
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.platform import Platform, traced
from trl_fp8.engine.vllm.policy_weights import PolicyWeights
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import TensorGroup
from trl_fp8.sync.writer import NamedTensor, SentTensor
from trl_fp8.upstream import vllm as upstream

from .adapter_tensors import A, adapter_tensors, factors, merged, room_for
from .engine_adapters import ADAPTERS, adapters_installed, slots_of
from .held_base import SharedBase


TOKENS = list(range(8))  # a prompt to try adapters with: attention needs a few, and every vocabulary has these


class BasePart(EnginePart):
    """Sends the base to the engine once, and lets the policy's layers compute with the engine's codes.

    The engine keeps them in memory while it sleeps.
    """

    def __init__(self, base: SharedBase):
        self.base = base
        self._adapters_read = True  # False: a compiled engine may not read them, which is tested once

    @cached_property
    def _room(self) -> dict[str, int]:
        return room_for(self.base.model)

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        # Adapter layers are added after vLLM has built the model, so vLLM's own hash does not cover them
        return {"additional_config": traced(adapters=self._room)}

    def starting(self, platform: Platform, recipe: FP8Recipe) -> AbstractContextManager:
        return adapters_installed(recipe, self._room)

    def started(self, generation: Generation) -> None:
        generation.llm.share_weights()

    def weights(self, generation: Generation) -> PolicyWeights:
        return AdapterWeights(generation, self.base)

    def ready(self, generation: Generation) -> None:
        recipe = generation.recipe
        layout = generation.engine.layout
        generation.wake_weights()
        generation.delivery.send(generation.delivery.frozen[0])
        self.base.share(lambda weight: held_codes(layout, recipe.engine_name(weight), recipe.format))
        # Tested after the first sync: with the random weights of now, adapters may not show in log-probs
        self._adapters_read = not upstream.engine_config(generation.llm).compilation_config.mode

    def synced(self, generation: Generation) -> None:
        if self._adapters_read:
            return
        with generation.cache_awake():
            unread = unread_adapters(generation.engine.model, lambda: generation.llm.log_probs(TOKENS))
            generation.engine.reset_prefix_cache()
        [found] = generation.largest([len(unread)])
        if found:
            where = ", ".join(unread) or "layers of another rank, see its log"
            raise RuntimeError(
                f"fp8_base=True: whatever adapters the engine holds, its log-probs stay the same ({where}). Rollouts "
                "would come from the base. The engine runs code that was compiled for one without these adapters: "
                f"vLLM took it from its compile cache ({envs.VLLM_CACHE_ROOT}/torch_compile_cache, unless "
                "vllm_engine_kwargs sets compilation_config cache_dir). Delete that folder, or set "
                "VLLM_DISABLE_COMPILE_CACHE=1 in the environment, and start again."
            )
        self._adapters_read = True


class AdapterWeights(PolicyWeights):
    """Source of a sync: adapters, and other trained parameters beside a frozen base."""

    def __init__(self, generation: Generation, base: SharedBase):
        super().__init__(generation)
        self.base = base
        recipe = self.recipe
        # By the policy's names; `slots_of` has the engine's
        self.slots = {recipe.linears[name]: slot for name, slot in slots_of(generation.engine.model).items()}
        codes = {name for w in recipe.fp8_tensors for name in (recipe.engine_name(w), recipe.scale_name(w))}
        frozen = {recipe.engine_name(name) for name, parameter in self.parameters() if not parameter.requires_grad}

        def frozen_tensors() -> AbstractContextManager[Iterator[SentTensor]]:
            return closing(self.whole(lambda: (p for p in self.parameters() if recipe.engine_name(p[0]) in frozen)))

        base_part = TensorGroup(self.layout.part(codes), lambda: closing(base.tensors()), one_by_one=True)
        self.frozen = base_part, TensorGroup(self.layout.part(frozen), frozen_tensors, one_by_one=self.dealt)

    def one_by_one(self, model: nn.Module) -> bool:
        return self.dealt  # unlike the parent's, also with PEFT: no adapter is merged in place, so tensors last

    def sent(self) -> AbstractContextManager[Iterator[SentTensor]]:
        named = self.model.named_parameters
        trained = self.whole(lambda: (each for each in named() if each[1].requires_grad or ".lora_" in each[0]))
        return closing(adapter_tensors(self.model, self.slots, trained))

    def merged(self) -> AbstractContextManager[Iterator[NamedTensor]]:
        return closing(self._merged())

    def _merged(self) -> Iterator[NamedTensor]:
        adapters = factors(self.model, self._adapters(self.model))
        yield from merged(self.whole(self.parameters), adapters)
        if self._generation.accelerator.is_main_process:
            yield from merged(self.base.originals(), adapters)

    def reference(self, model: nn.Module, names: Set[str]) -> AbstractContextManager[Iterator[SentTensor]]:
        own = self._reference(model, names, summed=False)
        sent = adapter_tensors(model, self.slots, chain(self._adapters(model), own))
        return closing((name, tensor) for name, tensor in sent if self.recipe.engine_name(name) in names)

    def _adapters(self, model: nn.Module) -> Iterator[NamedTensor]:
        return self.whole(lambda: (each for each in model.named_parameters() if ".lora_" in each[0]))


def unread_adapters(model: nn.Module, log_probs: Callable[[], torch.Tensor]) -> list[str]:
    """Return the linear layers of an engine's `model` whose adapters it does not compute with.

    vLLM looks for compiled code under a hash that covers the room for adapters. But users can point vLLM at one folder
    for all (`compilation_config={"cache_dir": ...}`), and vLLM may change what it hashes. An engine with adapters
    would then run code that was compiled without them: its tensors are right, but nothing reads them. So new values in
    an adapter have to change log-probs. Of layers that differ only in their number the first is tested. Afterwards
    adapters have their old values.

    Args:
        model: With the policy's weights. With random ones the change may be too small to show.
        log_probs: Of one sequence, as the engine computes them now.
    """
    before = log_probs()
    noise = (log_probs() - before).abs().max()  # kernels that add in no fixed order
    unread: list[str] = []
    tried = set()
    for name, module in model.named_modules():
        kind = re.sub(r"\.\d+\.", ".", name)
        if kind in tried or not hasattr(module, ADAPTERS[A]):
            continue
        tried.add(kind)
        weights = [module.get_submodule(attribute).weight.data for attribute in ADAPTERS.values()]
        originals = [weight.clone() for weight in weights]
        generator = torch.Generator().manual_seed(0)
        for weight in weights:  # A too: either may start at zero
            random = torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5
            weight.copy_(random)
        try:
            moved = (log_probs() - before).abs().max()
        finally:
            for weight, old in zip(weights, originals, strict=True):
                weight.copy_(old)
        if moved <= noise:
            unread.append(name)
    return unread
