"""Checks that a server computes the model of the policy, with the tensors of its recipe."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.recipe.from_model import outline_of, persistent_buffers
from trl_fp8.recipe.messages import listed
from trl_fp8.recipe.recipe import FP8Recipe

from .numbers import numbers_of


FP8 = "float8_e4m3fn"


def require_numbers(base_url: str, policy: nn.Module, server: dict) -> None:
    """Raise `ValueError` if a field of `numbers_of` in the server's config differs from the policy's."""
    own = numbers_of(policy.config.get_text_config())
    both = own.keys() & server.keys()  # vLLM's own config classes lack some fields and add others
    different = differences({name: own[name] for name in both}, {name: server[name] for name in both})
    if different:
        raise ValueError(
            f"{base_url} serves another model than the trainer has, in config.json: {different}. Start it with the "
            "model of the trainer."
        )


def shapes_beside(base_url: str, parts: Sequence[EnginePart], facts: Mapping[str, list]) -> dict[str, list[int]]:
    """Return name -> shape of the tensors that a sync sends to layers which the server has added to the model.

    The part that needs such layers computes the shapes from `facts` (`layout.Added.facts`). `ValueError` if no part
    needs the layers that the server has.
    """
    for part in parts:
        shapes = part.served(base_url, facts)
        if shapes is not None:
            return shapes
    if facts:
        raise ValueError(
            f"{base_url} has layers that no flag of the trainer asks for, at {listed(facts, 2)}. Start it without "
            "--lora, or set fp8_base=True for adapters beside an FP8 base."
        )
    return {}


def require_tensors(
    base_url: str, policy: nn.Module, recipe: FP8Recipe, server: dict[str, str], beside: Collection[str] = ()
) -> None:
    """Raise `ValueError` unless the server's tensors (name -> dtype) have the names and formats of the recipe.

    `beside`: names of further tensors that a sync sends (`shapes_beside`).
    """
    fp8 = {recipe.engine_name(name) for name in recipe.fp8_tensors}
    scales = {recipe.scale_name(name) for name in recipe.fp8_tensors}
    names = {recipe.engine_name(name) for name in outline_of(policy).parameters}
    names |= {recipe.engine_name(name) for name, _ in persistent_buffers(policy)}
    names |= {recipe.engine_name(name) for name in beside}
    names |= scales
    fp8_on_one_side = set()
    for name in names & server.keys():
        is_fp8_in_server = server[name] == FP8
        if is_fp8_in_server != (name in fp8):
            fp8_on_one_side.add(name)
    scale_dtype = recipe.format.scale_dtype
    problems = {
        "are in the policy and not in the server": names - server.keys(),
        "are in the server and not in the policy": server.keys() - names,
        "are FP8 on one side only": fp8_on_one_side,
        f"are scales in another dtype than {scale_dtype}": {
            name for name in scales & server.keys() if server[name] != scale_dtype
        },
    }
    texts = [f"{len(which)} tensors {what}: {listed(sorted(which), 4)}" for what, which in problems.items() if which]
    if texts:
        raise ValueError(
            f"{base_url} serves another model or another recipe than the trainer has: {'; '.join(texts)}. Start it "
            "with the model and the FP8 flags of the trainer."
        )


def require_scale_format(base_url: str, recipe: FP8Recipe, served: str) -> None:
    """Raise `ValueError` unless `served`, the scale format of the server's kernels, is that of the recipe."""
    if recipe.fp8_tensors and served != recipe.scale_format:
        raise ValueError(
            f"fp8_scale_format={recipe.scale_format!r}, but {base_url} was started with --scale-format {served}: its "
            f"kernels were chosen and checked for such scales. Start it with --scale-format {recipe.scale_format}."
        )


def require_cache(base_url: str, cached: Collection[int], recipe: FP8Recipe, served: list[int]) -> None:
    """Raise `ValueError` unless the server's KV cache is FP8 in the same layers as the recipe's.

    `served`: the server's layers with an FP8 cache. `cached`: the policy's layers that cache k and v; empty if the
    recipe's cache is not FP8.
    """
    expected = sorted(set(cached) - set(recipe.kv_cache_skip_layers))
    if served != expected:
        raise ValueError(
            f"{base_url} has an FP8 KV cache in the layers {served}, and the trainer's flags say {expected}. Start it "
            "with the trainer's --kv-cache-dtype and --kv-cache-skip-layers."
        )


def differences(one: dict, other: dict) -> str:
    """Return names and both values of the entries that differ, also in nested dictionaries; empty if none differ."""
    texts = []
    for name in sorted(one.keys() | other.keys()):
        first = one.get(name)
        second = other.get(name)
        if first == second:
            continue
        if isinstance(first, dict) and isinstance(second, dict):
            texts.append(f"{name} ({differences(first, second)})")
        else:
            texts.append(f"{name} {first!r}, {second!r}")
    return listed(texts, 4)
