"""LoRA adapters of a policy, in the form in which an engine holds them beside a frozen base.

A linear layer of the engine fuses S layers of the policy (such as q, k and v) and computes y = Q(W) x + B (A x). Q(W)
is the FP8 weight.

    A  [S R, K]       the layers' A, one below another
    B  [sum N, S R]   the layers' B as a block diagonal, each times its scaling s, before rounding to BF16

A layer has N out-features and K in-features. R is the largest rank among the adapters of the S layers. Adapters of a
smaller rank are padded with zeros, and a layer without an adapter gets zeros. A sync sends the zeros like all other
values, because everything that an engine computes with has a checksum.

    Slot                the place of one layer's A and B in an engine's linear layer
    adapter_tensors     yields what a sync sends
    with_adapters       yields W + s B A, to merge adapters into a base
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.names import checkpoint_name
from trl_fp8.sync.shards import GatherFailed


NamedTensor = tuple[str, torch.Tensor]
A, B = "lora_A", "lora_B"  # PEFT's names: "<layer>.lora_A.<adapter>.weight"


@dataclass(frozen=True)
class Slot:
    """The part of an engine's linear layer that holds the adapter of one of the policy's layers."""

    rank: int  # R
    index: int  # number of the policy's layer among the S fused layers
    fused: int  # S, the number of fused layers
    shape: tuple[int, int]  # `[N, K]`, of the weight of the policy's layer
    own_rank: int  # rank of the layer's own adapter, at most R; 0 if the layer has no adapter

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes `[R, K]` of A and `[N, S R]` of B, in which a sync sends them."""
        rows, columns = self.shape
        return {A: [self.rank, columns], B: [rows, self.fused * self.rank]}

    def pad(self, which: str, matrix: torch.Tensor) -> torch.Tensor:
        """Pad A `[r, K]` to `[R, K]`, or B `[N, r]` to `[N, S R]`, with zeros."""
        if which == A:
            return F.pad(matrix, (0, 0, 0, self.rank - len(matrix)))
        left = self.index * self.rank
        right = self.fused * self.rank - left - matrix.shape[1]
        return F.pad(matrix, (left, right))


def adapter_ranks(model: nn.Module) -> dict[str, int]:
    """Return the largest rank among the LoRA adapters of each layer, by the layer's checkpoint name.

    `ValueError` if several adapters are active, or if one is merged into its base.
    """
    layers = _adapted(model)
    _active(layers)  # raises the two errors
    return {name: max(layer.r.values()) for name, layer in layers.items() if layer.r}


def _active(layers: Mapping[str, LoraLayer]) -> str | None:
    """Return the name of the active adapter; None while adapters are disabled.

    `ValueError` if several are active, or if one is merged into its base, where the engine would add it twice.
    """
    merged = [name for name, layer in layers.items() if layer.merged]
    if merged:
        raise ValueError(
            f"fp8_base=True with adapters that are merged into the base: {listed(merged, 3)}. Call "
            "model.unmerge_adapter() first, or set fp8_base=False."
        )
    names = set()
    for layer in layers.values():
        if not layer.disable_adapters:
            names.update(layer.active_adapters)
    if len(names) > 1:
        raise ValueError(
            f"fp8_base=True with {len(names)} active adapters ({', '.join(sorted(names))}): the engine holds one. "
            "Activate one by model.set_adapter(name), or set fp8_base=False."
        )
    return names.pop() if names else None


def adapter_tensors(
    model: nn.Module, slots: Mapping[str, Slot], trained: Iterable[NamedTensor]
) -> Iterator[NamedTensor]:
    """Yield the (name, tensor) pairs that a sync sends: padded A and B of each slot, then zeros for empty slots.

    `trained` yields (PEFT's name, whole tensor) of the adapters and of other parameters to send. The other parameters
    are sent under their checkpoint names. `ValueError` if the active adapter does not fit into its slot.
    """
    unfilled = {(layer, which) for layer in slots for which in (A, B)}
    trained = iter(trained)
    try:
        for name, which, tensor in _active_matrices(model, trained):
            if which is None:  # a parameter of no adapter
                yield name, tensor
                continue
            slot = slots.get(name)
            rank = len(tensor) if which == A else tensor.shape[1]
            if slot is None or rank > slot.rank:
                room = "none" if slot is None else f"room for rank {slot.rank}"
                raise ValueError(
                    f"fp8_base=True: the active adapter has rank {rank} at {name}, where the engine has {room}, "
                    "because the engine was sized by the policy's adapters when it started. Add adapters before "
                    "the trainer is made."
                )
            unfilled.discard((name, which))
            yield f"{name}.{which}.weight", slot.pad(which, tensor)
    except GatherFailed:  # the other ranks still wait in that gather, so this rank must not start another collective
        raise
    except Exception:
        # Each step of `trained` gathers a parameter, which is a collective. Take the remaining steps, because the
        # other ranks would wait for this rank in the next gather
        for _ in trained:
            pass
        raise
    device = next(model.parameters()).device
    for layer, which in sorted(unfilled):
        yield f"{layer}.{which}.weight", torch.zeros(slots[layer].shapes[which], device=device)


def factors(model: nn.Module, parameters: Iterable[NamedTensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return layer -> FP32 copies of A `[r, K]` and s B `[N, r]` of the active adapter, by the keys `A` and `B`.

    `parameters` yields (PEFT's name, whole tensor).
    """
    factors_of_layers: dict[str, dict[str, torch.Tensor]] = {}
    for layer, which, tensor in _active_matrices(model, parameters):
        if which is not None:
            factors_of_layers.setdefault(layer, {})[which] = tensor.to(torch.float32, copy=True)
    return factors_of_layers


def with_adapters(
    weights: Iterable[NamedTensor], adapters: Mapping[str, Mapping[str, torch.Tensor]]
) -> Iterator[NamedTensor]:
    """Yield (checkpoint name, weight): W + s B A in FP32 for layers in `adapters`, and W for other layers.

    `adapters` is what `factors` returns.
    """
    for name, weight in weights:
        pair = adapters.get(name.removesuffix(".weight"))
        if pair:
            weight_fp32 = weight.detach().to(pair[A].device, torch.float32)
            weight = torch.addmm(weight_fp32, pair[B], pair[A])
        yield name, weight


def _active_matrices(
    model: nn.Module, parameters: Iterable[NamedTensor]
) -> Iterator[tuple[str, str | None, torch.Tensor]]:
    """Yield (layer, `A` or `B`, matrix A or s B) of the active adapter. Yield (checkpoint name, None, tensor) of each
    parameter that belongs to no adapter. Skip other adapters.
    """
    layers = _adapted(model)
    active = _active(layers)
    for peft_name, tensor in parameters:
        name = checkpoint_name(peft_name)
        layer, which, adapter = _parsed(name)
        if which is None:
            yield name, None, tensor
        elif adapter == active:
            matrix = tensor.detach()
            if which == B:
                matrix = matrix * layers[layer].scaling[adapter]
            yield layer, which, matrix


def _adapted(model: nn.Module) -> dict[str, LoraLayer]:
    """Return PEFT's wrappers of the layers with adapters, by the layers' checkpoint names."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layers[checkpoint_name(name)] = module
    return layers


def _parsed(name: str) -> tuple[str, str | None, str]:
    """Split "<layer>.lora_A.<adapter>.weight" into (layer, `A` or `B`, adapter). Other names give (name, None, "")."""
    for which in (A, B):
        layer, found, rest = name.partition(f".{which}.")
        if found:
            return layer, which, rest.removesuffix(".weight")
    return name, None, ""
