"""`PolicyWeights`: the tensors of a policy, as a sync sends them to an engine and as a checkpoint has them.

    tensors_to_send     for a sync. Sharded parameters are gathered in the form that the engine stores (sync/shards.py)
    policy_tensors      for a checkpoint. Whole parameters are gathered, one at a time
    reference           for a reference model that computes with an engine

Adapters are merged into one weight at a time (for a reference under FSDP2: into all weights at once). Afterwards the
weights get their own values back, bit for bit. FSDP2 and ZeRO-3 shard parameters. Gathering them is a collective.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import chain
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
    """A started engine and the policy that it follows."""

    model: nn.Module  # the policy
    recipe: FP8Recipe
    accelerator: Accelerator
    engine: Engine
    _dist: DistributedBackend  # how TRL gathers the policy

    def _iter_named_params(self) -> Iterator[NamedTensor]:
        """Yield `(checkpoint name, full tensor)` of the policy, with adapters merged."""


class PolicyWeights:
    """Sources of the tensors of a policy whose engine has started."""

    def __init__(self, generation: EngineOfPolicy):
        self._generation = generation
        self._dist = generation._dist
        self.model = generation.model
        self.recipe = generation.recipe
        self.layout = generation.engine.layout
        self.frozen: tuple[TensorGroup, ...] = ()  # tensors that are written once, not by each sync
        self.sharded = self._dist.is_zero3 or self._dist.is_fsdp  # whether parameters are sharded over ranks

    def yields_one_by_one(self, model: nn.Module) -> bool:
        """Return whether tensors of `tensors_to_send` and `reference` are valid only until the next one is yielded."""
        return self.sharded or is_peft_model(model)

    def tensors_to_send(self) -> AbstractContextManager[Iterator[SentTensor]]:
        """Return the `(checkpoint name, tensor)` pairs that a sync writes, in a `with` block."""
        reshard(self.model, self._dist)
        parameters = [(checkpoint_name(name), parameter) for name, parameter in self.model.named_parameters()]
        # Send whole tensors if adapters have to be merged into them first, if nothing is sharded, or if the shards do
        # not allow a gather in the engine's form
        if is_peft_model(self.model) or not self._sharded_over_one_group(parameters):
            return self.policy_tensors()
        return closing(self._gathered(parameters))

    def policy_tensors(self) -> AbstractContextManager[Iterator[NamedTensor]]:
        """Return `(checkpoint name, full tensor)` of the whole policy, in a `with` block."""
        return closing(self._generation._iter_named_params())

    def parameters(self) -> Iterator[NamedTensor]:
        """Yield `(checkpoint name, parameter)` of the policy, without adapters and PEFT's other copies of modules."""
        for name, parameter in self.model.named_parameters():
            if not of_adapter(name, self.model):
                yield checkpoint_name(name), parameter

    def whole(self, parameters: Callable[[], Iterator[NamedTensor]]) -> Iterator[NamedTensor]:
        """Yield parameters, gathered if FSDP2 shards them (a collective). Each is valid until the next is yielded."""
        # Reshard first: after a forward a parameter may be FSDP2's unsharded tensor, whose memory the next reshard
        # frees
        reshard(self.model, self._dist)
        if self._dist.is_fsdp:
            yield from self._gathered(list(parameters()))
        else:
            yield from parameters()

    def reference(self, model: nn.Module, names: Set[str]) -> AbstractContextManager[Iterator[SentTensor]]:
        """Return the weights of the reference model that have these `names` in the engine, in a `with` block.

        `model` is a copy of the policy, or the policy itself with its adapters disabled or with the reference's
        adapters active. Set the adapters before the call, and keep them until the block ends.
        """
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        has_adapters = any(not layer.disable_adapters and layer.active_adapters for layer in layers)
        return closing(self._reference(model, names, has_adapters))

    def _reference(self, model: nn.Module, names: Set[str], has_adapters: bool) -> Iterator[SentTensor]:
        """Yield the tensors of `reference`. With `has_adapters` active adapters are merged into them."""
        reshard(model, self._dist)
        parameters = self._reference_parameters(model, names)
        is_adapted = is_peft_model(model)
        adapters = adapters_of_parameters(model) if has_adapters else {}
        # PEFT merges whole weights, so under ZeRO-3 the whole model is gathered first
        with self._dist.gather_params(list(model.parameters()) if is_adapted else []):
            if self._dist.is_fsdp or (not is_adapted and self._sharded_over_one_group(parameters)):
                # Gather in the engine's form. Under FSDP2 adapters are merged into the shards first (without FSDP2
                # there are none here). Such a merge is a collective, so all ranks merge the same layers in the same
                # order, each once
                layers = list(dict.fromkeys(chain.from_iterable(adapters.values())))
                with merged(layers):
                    yield from self._gathered(parameters)
                return
            for name, parameter in parameters:
                layers = adapters.get(id(parameter), ())
                with self._dist.gather_params([] if is_adapted else [parameter]), merged(layers):
                    yield name, parameter.data

    def parts_of_reference(self, model: nn.Module, names: Set[str]) -> list[Tensor]:
        """Return this rank's part of the parameters, adapters included, from which `reference` makes these weights."""
        reshard(model, self._dist)
        parameters = [parameter for _, parameter in self._reference_parameters(model, names)]
        active: set[str] = set()  # names of the active adapters
        for module in model.modules():
            if isinstance(module, BaseTunerLayer) and not module.disable_adapters:
                active.update(module.active_adapters)
        for name, parameter in model.named_parameters():
            if ".lora_" in name and active.intersection(name.split(".")):
                parameters.append(parameter)
        return [local_part(parameter) for parameter in parameters]

    def _reference_parameters(self, model: nn.Module, names: Set[str]) -> list[NamedTensor]:
        """Return `reference_parameters` of the weights that have these `names` in the engine."""
        return [each for each in reference_parameters(model) if self.recipe.engine_name(each[0]) in names]

    def _gathered(self, parameters: list[NamedTensor]) -> Iterator[SentTensor]:
        return gathered(parameters, self.recipe, self.layout, self._generation.accelerator.device)

    def _sharded_over_one_group(self, parameters: list[NamedTensor]) -> bool:
        """Return whether FSDP2 or ZeRO-3 shards all `parameters` over the same ranks. Such parameters can be gathered
        in the engine's form.
        """
        if not self._dist.is_zero3:
            return self._dist.is_fsdp
        parts = [Sharded.of(parameter) for _, parameter in parameters]
        return None not in parts and len({part.group for part in parts}) == 1


def reshard(model: nn.Module, dist: DistributedBackend) -> None:
    """Shard parameters again that FSDP2 has left unsharded after a forward without backward."""
    if not dist.is_fsdp:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reference_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (checkpoint name, parameter) of the weights that a reference computes with, without adapters.

    If the reference is a copy of the policy, it computes with all weights; if it is the policy itself, with the base
    weights. PEFT trains some modules whole (`modules_to_save`), and keeps the original beside each trained copy. Of
    such a module only the weights that PEFT calls at present are yielded: the original's, or a copy's.
    """
    called_copies = []  # beginnings of the names of parameters
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            copy = "original_module" if module.disable_adapters else f"modules_to_save.{module.active_adapters[0]}"
            called_copies.append(f"{name}.{copy}.")
    for name, parameter in model.named_parameters():
        original = without_copies(name)
        is_in_copy = original != name
        if is_in_copy and not name.startswith(tuple(called_copies)):
            continue
        if not of_adapter(original, model):
            yield checkpoint_name(original), parameter


def adapters_of_parameters(model: nn.Module) -> dict[int, list[BaseTunerLayer]]:
    """Return the layers whose adapters PEFT merges into a parameter, by the parameter's id."""
    found: dict[int, list[BaseTunerLayer]] = {}
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for parameter in layer.get_base_layer().parameters():
                found.setdefault(id(parameter), []).append(layer)
    return found


@contextmanager
def merged(layers: Iterable[BaseTunerLayer]) -> Iterator[None]:
    """Merge the active adapters of `layers` inside the block. Restore the base weights afterwards.

    The base weights are restored from copies: PEFT's unmerging rounds them, so each sync would change them.
    """
    bases: set[nn.Parameter] = set()
    for layer in layers:
        bases.update(layer.get_base_layer().parameters())
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
