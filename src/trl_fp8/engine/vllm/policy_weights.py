"""The tensors of a policy: as a sync sends them to an engine, and as a checkpoint has them.

Adapters are merged into one weight at a time, whose own values are restored bit for bit. Parameters that FSDP2 or
ZeRO-3 shards are gathered, a collective: for a sync in the engine's form, for a checkpoint whole and one by one.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Protocol

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from trl.distributed import DistributedBackend

from trl_fp8.recipe.from_model import of_adapter
from trl_fp8.recipe.names import checkpoint_name, without_copies
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import Engine, TensorGroup
from trl_fp8.sync.shards import Sharded, gathered, local_part
from trl_fp8.sync.writer import NamedTensor, SentTensor


class EngineOfPolicy(Protocol):
    """An engine that has started and the policy that it follows."""

    model: nn.Module  # the policy
    recipe: FP8Recipe
    accelerator: Accelerator
    engine: Engine
    _dist: DistributedBackend  # how TRL gathers the policy

    def _iter_named_params(self) -> Iterator[NamedTensor]:
        """Yield `(checkpoint name, full tensor)` of the policy, adapters merged."""


class PolicyWeights:
    """The weights of the policy whose engine has started, as a sync sends them."""

    def __init__(self, generation: EngineOfPolicy):
        self._generation, self._dist = generation, generation._dist
        self.model, self.recipe, self.layout = generation.model, generation.recipe, generation.engine.layout
        self.frozen: tuple[TensorGroup, ...] = ()  # written once, not by each sync
        self.dealt = self._dist.is_zero3 or self._dist.is_fsdp  # over ranks

    def one_by_one(self, model: nn.Module) -> bool:
        """Return whether a tensor of `sent`, or of `reference`, lasts only until the next one is asked for."""
        return self.dealt or is_peft_model(model)

    def sent(self) -> AbstractContextManager[Iterator[SentTensor]]:
        """Return `(checkpoint name, tensor)` of what a sync writes, in a `with` block."""
        reshard(self.model, self._dist)
        parameters = [(checkpoint_name(name), parameter) for name, parameter in self.model.named_parameters()]
        if is_peft_model(self.model) or not self._sharded_over_one_group(parameters):
            return self.merged()
        return closing(self._gathered(parameters))

    def merged(self) -> AbstractContextManager[Iterator[NamedTensor]]:
        """Return `(checkpoint name, full tensor)` of the whole policy, in a `with` block."""
        return closing(self._generation._iter_named_params())

    def parameters(self) -> Iterator[NamedTensor]:
        """Yield the policy by checkpoint name, without adapters and copies of modules that are not active."""
        for name, parameter in self.model.named_parameters():
            if not of_adapter(name, self.model):
                yield checkpoint_name(name), parameter

    def whole(self, parameters: Callable[[], Iterator[NamedTensor]]) -> Iterator[NamedTensor]:
        """Yield parameters, gathered if FSDP2 shards them (a collective). Each lasts until the next is asked for."""
        reshard(self.model, self._dist)  # first: an unsharded parameter is another object, which loses its memory
        yield from self._gathered(list(parameters())) if self._dist.is_fsdp else parameters()

    def reference(self, model: nn.Module, names: Set[str]) -> AbstractContextManager[Iterator[SentTensor]]:
        """Return the weights of a reference that the engine calls `names`, in a `with` block.

        It is a copy of the policy, or the policy itself, which has its adapters disabled, or those of the reference
        active, when the block is entered.
        """
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        summed = any(not layer.disable_adapters and layer.active_adapters for layer in layers)
        return closing(self._reference(model, names, summed))

    def _reference(self, model: nn.Module, names: Set[str], summed: bool) -> Iterator[SentTensor]:
        """Yield what `reference` returns. If `summed`, its weights are sums, with those of adapters."""
        reshard(model, self._dist)
        own = [each for each in reference_parameters(model) if self.recipe.engine_name(each[0]) in names]
        adapted = is_peft_model(model)
        adapters = adapters_of_parameters(model) if summed else {}
        with self._dist.gather_params(list(model.parameters()) if adapted else []):
            if self._dist.is_fsdp or (not adapted and self._sharded_over_one_group(own)):
                with merged({layer: None for layers in adapters.values() for layer in layers}):  # a collective
                    yield from self._gathered(own)
                return
            for name, parameter in own:
                with (
                    self._dist.gather_params([] if adapted else [parameter]),
                    merged(adapters.get(id(parameter), ())),
                ):
                    yield name, parameter.data

    def parts_of_reference(self, model: nn.Module, names: Set[str]) -> list[Tensor]:
        """Return this rank's share of the parameters that `reference` of the same arguments is made of."""
        reshard(model, self._dist)
        own = [each for name, each in reference_parameters(model) if self.recipe.engine_name(name) in names]
        layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer) and not each.disable_adapters]
        active = {adapter for layer in layers for adapter in layer.active_adapters}
        for name, parameter in model.named_parameters():
            if ".lora_" in name and active.intersection(name.split(".")):
                own.append(parameter)
        return [local_part(each) for each in own]

    def _gathered(self, parameters: list[NamedTensor]) -> Iterator[SentTensor]:
        return gathered(parameters, self.recipe, self.layout, self._generation.accelerator.device)

    def _sharded_over_one_group(self, parameters: list[NamedTensor]) -> bool:
        """Return whether FSDP2 or ZeRO-3 shards these over the same ranks, to be gathered in the engine's form."""
        if not self._dist.is_zero3:
            return self._dist.is_fsdp
        parts = [Sharded.of(parameter) for _, parameter in parameters]
        return None not in parts and len({part.group for part in parts}) == 1


def reshard(model: nn.Module, dist: DistributedBackend) -> None:
    """Shard what FSDP2 leaves unsharded after a forward without backward."""
    for module in model.modules() if dist.is_fsdp else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def reference_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (checkpoint name, parameter) of what a reference computes with, without adapters: all of a copy of the
    policy; of the policy itself the base and, of modules that PEFT copied to train them, the copy that it calls now.
    """
    called = []
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            trained = f"modules_to_save.{module.active_adapters[0]}"
            called.append(f"{name}.{'original_module' if module.disable_adapters else trained}.")
    for name, parameter in model.named_parameters():
        original = without_copies(name)
        if not of_adapter(original, model) and (original == name or name.startswith(tuple(called))):
            yield checkpoint_name(original), parameter


def adapters_of_parameters(model: nn.Module) -> dict[int, list[BaseTunerLayer]]:
    """Return, by the id of each parameter that has adapters, the layers which PEFT merges into it."""
    found: dict[int, list[BaseTunerLayer]] = {}
    for layer in model.modules():
        for parameter in layer.get_base_layer().parameters() if isinstance(layer, BaseTunerLayer) else ():
            found.setdefault(id(parameter), []).append(layer)
    return found


@contextmanager
def merged(layers: Iterable[BaseTunerLayer]) -> Iterator[None]:
    """Merge the active adapters of `layers` inside the block; afterwards base weights have their own values.

    PEFT's unmerging rounds: without the copies that are made here each sync would change the base.
    """
    bases = {parameter for layer in layers for parameter in layer.get_base_layer().parameters()}
    before = [(base, base.data.clone()) for base in bases]
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer in layers:
            if layer.merged:
                layer.unmerge()
        for base, values in before:
            base.data.copy_(values)
