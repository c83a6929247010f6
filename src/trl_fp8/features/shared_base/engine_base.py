"""The FP8 base of a policy in an engine with adapter layers: it is sent once; each sync sends only what is trained."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, closing
from functools import cached_property
from itertools import chain

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm import envs

from trl_fp8.engine.vllm.colocated import Delivered, Generation
from trl_fp8.engine.vllm.layout import held_codes
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.platform import Platform, compile_cache_key
from trl_fp8.engine.vllm.policy_weights import PolicyWeights
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import TensorGroup
from trl_fp8.sync.shards import GatherFailed
from trl_fp8.sync.writer import NamedTensor, SentTensor
from trl_fp8.upstream import vllm as upstream

from .adapter_tensors import A, Slot, adapter_ranks, adapter_tensors, factors, with_adapters
from .engine_adapters import ADAPTERS, adapters_installed, slots_of
from .held_base import SharedBase
from .server_slots import require_same_ranks, slots_from


TRIAL_PROMPT = list(range(8))  # for `unread_adapters`: attention needs a few tokens, and every vocabulary has these


class BasePart(EnginePart):
    """Sends the base to the engine once, and lets the policy's layers compute with the engine's codes.

    A sleeping engine keeps the codes in memory, because the policy computes with them.
    """

    def __init__(self, base: SharedBase):
        self.base = base
        # Whether the next `synced` has to test that the engine computes with its adapters. `ready` decides this
        self._is_untested = False

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return adapter_ranks(self.base.model)

    def arguments(self, platform: Platform, recipe: FP8Recipe, config: PretrainedConfig, user: dict) -> dict:
        # Adapter layers are added after vLLM has built the model, so vLLM's hash of compiled code does not cover them
        return {"additional_config": compile_cache_key(adapters=self._ranks)}

    def starting(self, platform: Platform, recipe: FP8Recipe) -> AbstractContextManager:
        ranks = {recipe.engine_name(layer): rank for layer, rank in self._ranks.items()}
        return adapters_installed(recipe.linears, ranks)

    def started(self, generation: Generation) -> None:
        generation.llm.share_weights()

    def served(self, base_url: str, facts: Mapping[str, list]) -> dict[str, list[int]]:
        """Return name -> shape of A and B of the layers to which the server has added adapters.

        `ValueError` if the policy's adapters have other ranks.
        """
        recipe = self.base.recipe
        require_same_ranks(base_url, facts, self._ranks, recipe)
        shapes = {}
        for layer, slot in slots_from(facts).items():
            for which, shape in slot.shapes.items():  # A and B
                shapes[f"{recipe.linears[layer]}.{which}.weight"] = shape
        return shapes

    def weights(self, generation: Generation) -> PolicyWeights:
        return AdapterWeights(generation, self.base, slots_of(generation.engine.model))

    def ready(self, generation: Generation) -> None:
        generation.wake_weights()
        self._share(generation)
        # Only compiled code can be without adapters (see `unread_adapters`). The test runs after the first sync. Until
        # then the weights beside the base are random, and adapters might not change log-probs
        is_compiled = bool(upstream.engine_config(generation.llm).compilation_config.mode)  # NONE is 0
        self._is_untested = is_compiled

    def _share(self, generation: Delivered) -> None:
        """Send the base, then let the policy's layers compute with the FP8 codes that are now in the engine."""
        recipe = generation.recipe
        layout = generation.engine.layout
        generation.delivery.send(generation.weights.base_part)
        self.base.share(lambda weight: held_codes(layout, recipe.engine_name(weight), recipe.format))

    def synced(self, generation: Generation) -> None:
        if not self._is_untested:
            return
        with generation.cache_awake():
            unread = unread_adapters(generation.engine.model, lambda: generation.llm.log_probs(TRIAL_PROMPT))
            generation.engine.reset_prefix_cache()
        [most_unread] = generation.largest([len(unread)])  # over all ranks, so that all raise together
        if most_unread:
            where = ", ".join(unread) or "layers of another rank, see its log"
            raise RuntimeError(
                f"fp8_base=True: whatever adapters the engine holds, its log-probs stay the same ({where}). Rollouts "
                "would come from the base. The engine runs code that was compiled for an engine without these "
                f"adapters, from vLLM's compile cache ({envs.VLLM_CACHE_ROOT}/torch_compile_cache, unless "
                "vllm_engine_kwargs sets compilation_config cache_dir). Delete that folder, or set "
                "VLLM_DISABLE_COMPILE_CACHE=1 in the environment, and start again."
            )
        self._is_untested = False


class AdapterWeights(PolicyWeights):
    """The tensors of a policy with adapters on a frozen FP8 base.

    A sync sends the adapters and other trained parameters. `frozen` is sent once: the base's FP8 weights with their
    scales (`base_part`), and the frozen parameters that stay unquantized.

    Args:
        slots: Engine's name of each layer with adapters -> its slot (adapter_tensors.py).
    """

    def __init__(self, generation: Delivered, base: SharedBase, slots: Mapping[str, Slot]):
        super().__init__(generation)
        self.base = base
        recipe = self.recipe
        self.slots = {recipe.linears[name]: slot for name, slot in slots.items()}  # by the policy's names

        codes = {recipe.engine_name(name) for name in recipe.fp8_tensors}
        scales = {recipe.scale_name(name) for name in recipe.fp8_tensors}
        base_layout = self.layout.part(codes | scales)
        self.base_part = TensorGroup(base_layout, lambda: closing(base.tensors()), one_by_one=True)

        unquantized = {
            recipe.engine_name(name) for name, parameter in self.parameters() if not parameter.requires_grad
        }

        def unquantized_parameters() -> Iterator[NamedTensor]:
            for name, parameter in self.parameters():
                if recipe.engine_name(name) in unquantized:
                    yield name, parameter

        unquantized_part = TensorGroup(
            self.layout.part(unquantized),
            lambda: closing(self.whole(unquantized_parameters)),
            one_by_one=self.sharded,
        )
        self.frozen = self.base_part, unquantized_part

    def yields_one_by_one(self, model: nn.Module) -> bool:
        # Unlike in the parent, a PEFT model makes no difference: here no adapter is merged into a weight
        return self.sharded

    def tensors_to_send(self) -> AbstractContextManager[Iterator[SentTensor]]:
        def trained() -> Iterator[NamedTensor]:
            for name, parameter in self.model.named_parameters():
                # Adapters also if they are frozen: the engine computes with the active one
                if parameter.requires_grad or ".lora_" in name:
                    yield name, parameter

        return closing(adapter_tensors(self.model, self.slots, self.whole(trained)))

    def policy_tensors(self) -> AbstractContextManager[Iterator[NamedTensor]]:
        def summed() -> Iterator[NamedTensor]:
            lora_parameters = self._adapters(self.model)
            weights = self.whole(self.parameters)
            try:
                factors_by_layer = factors(self.model, lora_parameters)
                yield from with_adapters(weights, factors_by_layer)
            except GatherFailed:
                # The other ranks still wait in that gather, so this rank must not start another collective
                raise
            except Exception as error:
                _join_gathers(lora_parameters, error)
                _join_gathers(weights, error)
                raise
            # A checkpoint has the base in high precision, too. Only the main process writes checkpoints, and it needs
            # no other rank to read the base
            if self._generation.accelerator.is_main_process:
                yield from with_adapters(self.base.originals(), factors_by_layer)

        return closing(summed())

    def reference(self, model: nn.Module, names: Set[str]) -> AbstractContextManager[Iterator[SentTensor]]:
        weights = self._reference(model, names, has_adapters=False)  # adapters are tensors of their own, not merged
        tensors = adapter_tensors(model, self.slots, chain(self._adapters(model), weights))
        # `adapter_tensors` yields A and B of all layers, but `names` may have only some of them
        return closing((name, tensor) for name, tensor in tensors if self.recipe.engine_name(name) in names)

    def _adapters(self, model: nn.Module) -> Iterator[NamedTensor]:
        """Yield (PEFT's name, whole tensor) of A and B of all adapters. Collective."""

        def parameters() -> Iterator[NamedTensor]:
            for name, parameter in model.named_parameters():
                if ".lora_" in name:
                    yield name, parameter

        return self.whole(parameters)


def _join_gathers(source: Iterator[NamedTensor], error: Exception) -> None:
    """Take part in the remaining gathers of `source` after `error`, because other ranks would wait for this rank.

    If a gather raises another error, `source` ends, and `error` gets a note. `GatherFailed` is raised: no gather may
    follow it.
    """
    try:
        for _ in source:
            pass
    except GatherFailed:
        raise
    except Exception as second:
        error.add_note(f"In the gathers that followed: {second}")


def unread_adapters(model: nn.Module, log_probs: Callable[[], torch.Tensor]) -> list[str]:
    """Return the linear layers of an engine's `model` whose adapters the engine does not compute with.

    vLLM looks for compiled code under a hash that covers the adapters' ranks (`compile_cache_key`). But users can make
    vLLM use one folder for all engines (`compilation_config={"cache_dir": ...}`), and vLLM may change what it hashes.
    An engine with adapters would then run code that was compiled without them: its tensors are right, but nothing
    reads them. So this function writes new values into an adapter, which have to change the log-probs, and restores
    the old values. Of layers whose names differ only in a number, it tests one.

    Args:
        model: The engine's model with the policy's weights. With random weights the change may be too small to show.
        log_probs: Returns the log-probs of one sequence, as the engine computes them now.
    """
    before = log_probs()
    noise = (log_probs() - before).abs().max()  # not 0 with kernels that add in no fixed order
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
        for weight in weights:  # both A and B, because B A is zero if either is
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
        try:
            moved = (log_probs() - before).abs().max()
        finally:
            for weight, old in zip(weights, originals, strict=True):
                weight.copy_(old)
        if moved <= noise:
            unread.append(name)
    return unread
