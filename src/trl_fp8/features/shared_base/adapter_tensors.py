"""LoRA adapters of a policy, in the form in which an engine holds them beside a frozen base.

    engine's linear    y = Q(W) x + B (A x)          for all the policy's layers that it fuses, in one go
    A  [S R, K]        the layers' A, one below another
    B  [N, S R]        the layers' s B as blocks of a diagonal: scaling folded in, before it is rounded to BF16

S layers are fused, R is the largest rank among their adapters; smaller ones, and layers without any, are padded
with zeros, which are sent like the rest: everything that an engine computes with has a checksum.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import checkpoint_name


NamedTensor = tuple[str, torch.Tensor]
A, B = "lora_A", "lora_B"  # what PEFT calls them, between the name of a layer and ".weight"


@dataclass(frozen=True)
class Slot:
    """Place of the adapter of one of the policy's layers in an engine's linear."""

    rank: int  # R
    number: int  # of the layer, among those that are fused
    count: int  # S
    shape: tuple[int, int]  # of the layer's weight, `[N, K]`

    def placed(self, which: str, matrix: torch.Tensor) -> torch.Tensor:
        """Pad A `[r, K]` to `[R, K]`, B `[N, r]` to `[N, S R]`."""
        if which == A:
            return F.pad(matrix, (0, 0, 0, self.rank - len(matrix)))
        before = self.number * self.rank
        return F.pad(matrix, (before, self.count * self.rank - before - matrix.shape[1]))


def room_for(model: nn.Module) -> dict[str, int]:
    """Return checkpoint name of each layer with LoRA adapters -> the largest rank among them. `ValueError` if several
    are active.
    """
    layers = _adapted(model)
    _active(layers)
    return {name: max(layer.r.values()) for name, layer in layers.items() if layer.r}


def _active(layers: Mapping[str, LoraLayer]) -> str | None:
    """Return the name of the active adapter; None while adapters are disabled. `ValueError` if several are active, or
    if one is merged into its base and would count twice.
    """
    merged = [name for name, layer in layers.items() if layer.merged]
    if merged:
        raise ValueError(
            f"fp8_base=True with adapters that are merged into the base: {listed(merged, 3)}. Call "
            "model.unmerge_adapter() first, or set fp8_base=False."
        )
    names = {name for layer in layers.values() if not layer.disable_adapters for name in layer.active_adapters}
    if len(names) > 1:
        raise ValueError(
            f"fp8_base=True with {len(names)} active adapters ({', '.join(sorted(names))}): the engine holds one. "
            "Activate one by model.set_adapter(name), or set fp8_base=False."
        )
    return names.pop() if names else None


def adapter_tensors(
    model: nn.Module, slots: Mapping[str, Slot], trained: Iterable[NamedTensor]
) -> Iterator[NamedTensor]:
    """Yield the tensors that an engine is sent: its slots, filled from the adapters among `trained`, and whole tensors
    under their checkpoint names. `trained` is PEFT's `(name, full tensor)` of all trained parameters.
    """
    due = {(layer, which) for layer in slots for which in (A, B)}
    trained = iter(trained)
    try:
        for name, which, tensor in _in_force(model, trained):
            if which is None:
                yield name, tensor
            else:
                slot = slots.get(name)
                rank = tensor.shape[0 if which == A else 1]
                if slot is None or rank > slot.rank:
                    room = "none" if slot is None else f"room for rank {slot.rank}"
                    raise ValueError(
                        f"fp8_base=True: the active adapter has rank {rank} at {name}, where the engine has {room}: "
                        "it was made for the adapters that the policy had then. Add adapters before the trainer is "
                        "made."
                    )
                due.discard((name, which))
                yield f"{name}.{which}.weight", slot.placed(which, tensor)
    except Exception:
        for _ in trained:  # gathers are collective: other ranks wait for this one
            pass
        raise
    device = next(model.parameters()).device
    for layer, which in sorted(due):
        rows, columns = slots[layer].shape
        nothing = torch.zeros((0, columns) if which == A else (rows, 0), device=device)
        yield f"{layer}.{which}.weight", slots[layer].placed(which, nothing)


def factors(model: nn.Module, parameters: Iterable[NamedTensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return layer -> A `[r, K]` and s B `[N, r]` in force, FP32 copies, of PEFT's `(name, full tensor)`."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for layer, which, tensor in _in_force(model, parameters):
        if which is not None:
            found.setdefault(layer, {})[which] = tensor.to(torch.float32, copy=True)
    return found


def merged(
    weights: Iterable[NamedTensor], adapters: Mapping[str, Mapping[str, torch.Tensor]]
) -> Iterator[NamedTensor]:
    """Yield W + s B A in FP32 for each `(checkpoint name, W)` that has `factors`; others as they are."""
    for name, weight in weights:
        both = adapters.get(name.removesuffix(".weight"))
        if both:
            weight = torch.addmm(weight.detach().to(both[A].device, torch.float32), both[B], both[A])
        yield name, weight


def _in_force(model: nn.Module, parameters: Iterable[NamedTensor]) -> Iterator[tuple[str, str | None, torch.Tensor]]:
    """Yield (layer, `A` or `B`, matrix) of the active adapter, scaling in B; others as (name, None, tensor)."""
    layers = _adapted(model)
    active = _active(layers)
    for name, tensor in parameters:
        layer, which, adapter = _parsed(checkpoint_name(name))
        if which is None:
            yield layer, None, tensor
        elif adapter == active:
            yield layer, which, tensor.detach() * layers[layer].scaling[adapter] if which == B else tensor.detach()


def _adapted(model: nn.Module) -> dict[str, LoraLayer]:
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {checkpoint_name(name): layer for name, layer in layers}


def _parsed(name: str) -> tuple[str, str | None, str]:
    """Split "<layer>.lora_A.<adapter>.weight" into (layer, `A` or `B`, adapter); others into (name, None, "")."""
    for which in (A, B):
        layer, found, rest = name.partition(f".{which}.")
        if found:
            return layer, which, rest.removesuffix(".weight")
    return name, None, ""
