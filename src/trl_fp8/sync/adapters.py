"""LoRA adapters of a policy, in the form in which an engine holds them beside a frozen base.

    engine's linear    y = Q(W) x + B (A x)          for all the policy's layers that it fuses, in one go
    A  [S R, K]        the layers' A, one below another
    B  [N, S R]        the layers' s B as blocks of a diagonal: scaling folded in, before it is rounded to BF16

S layers are fused, R is the largest rank among their adapters; smaller ones, and layers without any, are filled up
with zeros, which are sent like the rest: what an engine computes with has a checksum, all of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from trl_fp8.recipe.names import checkpoint_name


Named = tuple[str, torch.Tensor]
A, B = "lora_A", "lora_B"  # what PEFT calls them, between the name of a layer and ".weight"


@dataclass(frozen=True)
class Slot:
    """Where an engine's linear has the adapter of one of the policy's layers."""

    rank: int  # R
    number: int  # of the layer, among those that are fused
    count: int  # S
    shape: tuple[int, int]  # of the layer's weight, `[N, K]`

    def placed(self, which: str, matrix: torch.Tensor) -> torch.Tensor:
        """A `[r, K]` -> `[R, K]`, B `[N, r]` -> `[N, S R]`."""
        if which == A:
            return F.pad(matrix, (0, 0, 0, self.rank - len(matrix)))
        before, missing = self.number * self.rank, self.rank - matrix.shape[1]
        return F.pad(matrix, (before, (self.count - self.number - 1) * self.rank + missing))

    def empty(self, which: str, device: torch.device) -> torch.Tensor:
        rows, columns = (self.rank, self.shape[1]) if which == A else (self.shape[0], self.count * self.rank)
        return torch.zeros(rows, columns, device=device)


def room_for(model: nn.Module) -> dict[str, int]:
    """Checkpoint name of each layer with LoRA adapters -> the largest rank among them; raises as `active_adapter`."""
    active_adapter(model)
    return {name: max(layer.r.values()) for name, layer in _adapted(model).items() if layer.r}


def active_adapter(model: nn.Module) -> str | None:
    """Name of the adapter in force; None while adapters are disabled. `ValueError` if there are several."""
    layers = _adapted(model).values()
    names = {name for layer in layers if not layer.disable_adapters for name in layer.active_adapters}
    if len(names) > 1:
        raise ValueError(
            f"fp8_base=True with {len(names)} active adapters ({', '.join(sorted(names))}): the engine holds one. "
            "Activate one by model.set_adapter(name), or set fp8_base=False."
        )
    return names.pop() if names else None


def adapter_tensors(model: nn.Module, slots: Mapping[str, Slot], trained: Iterable[Named]) -> Iterator[Named]:
    """What an engine is sent of `trained`, PEFT's `(name, full tensor)` of all trained parameters: its slots, filled,
    and whole tensors under their checkpoint names.
    """
    layers, active = _adapted(model), active_adapter(model)
    due = {(layer, which) for layer in slots for which in (A, B)}
    for name, tensor in trained:
        layer, which, adapter = _parsed(checkpoint_name(name))
        if which is None:
            yield checkpoint_name(name).replace(f".modules_to_save.{active}.", "."), tensor
        elif adapter == active:
            due.discard((layer, which))
            scaled = tensor.detach() * layers[layer].scaling[adapter] if which == B else tensor.detach()
            yield f"{layer}.{which}.weight", slots[layer].placed(which, scaled)
    device = next(model.parameters()).device
    for layer, which in sorted(due):
        yield f"{layer}.{which}.weight", slots[layer].empty(which, device)


def _adapted(model: nn.Module) -> dict[str, LoraLayer]:
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {checkpoint_name(name): layer for name, layer in layers}


def _parsed(name: str) -> tuple[str, str | None, str]:
    """(layer, `A` or `B`, adapter) of "<layer>.lora_A.<adapter>.weight"; of others (name, None, "")."""
    for which in (A, B):
        layer, found, rest = name.partition(f".{which}.")
        if found:
            return layer, which, rest.removesuffix(".weight")
    return name, None, ""
