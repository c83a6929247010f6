"""The adapter layers of a server, as its workers describe them, compared with those that a policy needs."""

import json
from collections.abc import Iterable, Mapping

from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.recipe import FP8Recipe

from .adapter_tensors import Slot


def slots_from(facts: Mapping[str, list]) -> dict[str, Slot]:
    """Return the slots of a server by the engine's name of a layer.

    `facts` is what `AdapterLinear.facts` returned in the server.
    """
    slots = {}
    for layer, (rank, index, fused, shape, own_rank) in facts.items():
        slots[layer] = Slot(rank=rank, index=index, fused=fused, shape=tuple(shape), own_rank=own_rank)
    return slots


def require_same_ranks(base_url: str, facts: Mapping[str, list], ranks: Mapping[str, int], recipe: FP8Recipe) -> None:
    """Raise `ValueError` unless a server has adapters of these `ranks` (policy's name of a layer -> rank)."""
    needed = {recipe.engine_name(layer): rank for layer, rank in ranks.items()}
    served = {layer: slot.own_rank for layer, slot in slots_from(facts).items() if slot.own_rank}
    if served == needed:
        return
    different = sorted(layer for layer in needed.keys() | served if needed.get(layer) != served.get(layer))
    differences = (f"{layer} ({needed.get(layer, 0)}, {served.get(layer, 0)})" for layer in different)
    raise ValueError(
        f"fp8_base=True: {base_url} has other room for adapters than the policy needs. Ranks (policy, server; 0: none)"
        f" differ in {len(different)} layers: {listed(differences, 4)}. Start the server with "
        f"--lora '{lora_argument(ranks, recipe.linears.values())}', or set fp8_base=False."
    )


def lora_argument(ranks: Mapping[str, int], linears: Iterable[str]) -> str:
    """Return the value of `--lora` that gives a server adapters of these `ranks` (policy's name of a layer -> rank).

    `linears` are the names of all linear layers of the policy.
    """
    # A layer's kind is the last part of its name. Collect the ranks of all layers of a kind; 0: no adapter
    ranks_of_kind: dict[str, set[int]] = {}
    for layer in linears:
        kind = layer.rpartition(".")[2]
        ranks_of_kind.setdefault(kind, set()).add(ranks.get(layer, 0))
    rank_by_kind = {layer.rpartition(".")[2]: rank for layer, rank in ranks.items()}
    # Name kinds in place of whole layers, which is shorter, if all layers of each kind have the same rank
    kinds_suffice = all(len(ranks_of_kind[kind]) == 1 for kind in rank_by_kind)
    targets = rank_by_kind if kinds_suffice else ranks  # name for `target_modules` -> rank
    largest = max(targets.values())
    config = {"r": largest, "target_modules": sorted(targets)}
    smaller = {name: rank for name, rank in sorted(targets.items()) if rank != largest}
    if smaller:
        config["rank_pattern"] = smaller
    return json.dumps(config)
