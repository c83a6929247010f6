"""The adapter layers of a server, as its workers describe them, compared with those that a policy needs."""

import json
from collections.abc import Iterable, Mapping

from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.recipe import FP8Recipe

from .adapter_tensors import Slot


def slots_from(facts: Mapping[str, list]) -> dict[str, Slot]:
    """Return engine's name of a layer -> its slot. `facts` is what `AdapterLinear.facts` returned in a server."""
    slots = {}
    for layer, (rank, index, fused, shape, own_rank) in facts.items():
        slots[layer] = Slot(rank, index, fused, tuple(shape), own_rank)
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
    ranks_of_kind: dict[str, set[int]] = {}  # last part of a layer's name -> ranks of its layers; 0: no adapter
    for layer in linears:
        ranks_of_kind.setdefault(layer.rpartition(".")[2], set()).add(ranks.get(layer, 0))
    targets = dict(ranks)  # name for `target_modules` -> rank
    kinds = {layer.rpartition(".")[2] for layer in ranks}
    if all(len(ranks_of_kind[kind]) == 1 for kind in kinds):  # the last parts determine the ranks, and are shorter
        targets = {kind: rank for kind in kinds for rank in ranks_of_kind[kind]}
    largest = max(targets.values())
    config = {"r": largest, "target_modules": sorted(targets)}
    smaller = {name: rank for name, rank in sorted(targets.items()) if rank != largest}
    if smaller:
        config["rank_pattern"] = smaller
    return json.dumps(config)
