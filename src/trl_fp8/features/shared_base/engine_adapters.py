"""Room for LoRA adapters in an engine: two linear layers of vLLM's own beside each linear that has them.

    y = Q(W) x + B (A x)        each product rounded to BF16, as vLLM's LoRA kernels do, and added

vLLM's LoRA would choose an adapter for each token, in layers of other names, with kernels that have to be told of
every batch. Here one adapter serves all tokens: A and B are unquantized linears, run by the same kernels as any other
(batch invariant where those are), compiled, captured in graphs and called by a trainer like any other, and what they
hold is written, audited and sealed as weights are.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, QuantizeMethodBase, ReplicatedLinear
from vllm.model_executor.model_loader import base_loader

from trl_fp8.engine.vllm.layout import ADAPTERS, shards
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.upstream.patches import substituted

from .adapter_tensors import A, B, Slot


class _WithAdapter:
    """Mixed into the class of what computes a linear layer."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = super().apply(layer, x, bias)
        return y + layer.lora_b(layer.lora_a(x))


def adapters_installed(recipe: FP8Recipe, ranks: Mapping[str, int]) -> AbstractContextManager[None]:
    """Engines whose models are made inside the block have room for adapters of these ranks, by policy layer."""
    ranks = {recipe.engine_name(layer): rank for layer, rank in ranks.items()}
    make = base_loader.initialize_model

    def made(vllm_config: VllmConfig, **kwargs) -> nn.Module:
        model = make(vllm_config=vllm_config, **kwargs)
        with set_current_vllm_config(vllm_config):
            _install(model, recipe.linears, ranks)
        return model

    return substituted(base_loader, "initialize_model", made)


def _install(model: nn.Module, linears: Collection[str], ranks: Mapping[str, int]) -> None:
    missing = set(ranks)
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, LinearBase):
            continue
        layers = [name for name, *_ in shards(model, prefix, module, linears)]
        if rank := max((ranks.get(layer, 0) for layer in layers), default=0):
            missing -= set(layers)
            width, options = len(layers) * rank, {"bias": False, "return_bias": False, "disable_tp": True}
            a_shape, b_shape = (module.input_size_per_partition, width), (width, module.output_size_per_partition)
            for which, shape in ((A, a_shape), (B, b_shape)):
                layer = ReplicatedLinear(*shape, prefix=f"{prefix}.{ADAPTERS[which]}", **options)
                module.add_module(ADAPTERS[which], layer)
            module.quant_method = _with_adapter(module.quant_method)
    if missing:
        raise ValueError(
            f"fp8_base=True: the engine's {type(model).__name__} has no linear layer for adapters of "
            f"{', '.join(sorted(missing)[:6])}. Take them out of target_modules, or set fp8_base=False."
        )


def _with_adapter(method: QuantizeMethodBase) -> QuantizeMethodBase:
    """An instance of the same class, and of `_WithAdapter` before it, with the same attributes."""
    cls = type(method)
    made = object.__new__(_subclass(cls))
    vars(made).update(vars(method))
    return made


@cache
def _subclass(cls: type[QuantizeMethodBase]) -> type[QuantizeMethodBase]:
    return type(cls.__name__, (_WithAdapter, cls), {"__module__": cls.__module__})


def slots_of(model: nn.Module, linears: Collection[str]) -> dict[str, Slot]:
    """Each slot, by the name that the policy's layer has in the engine; `linears`: as for `engine_layout`."""
    slots = {}
    for prefix, module in model.named_modules():
        if isinstance(module, LinearBase) and hasattr(module, ADAPTERS[A]):
            layers = list(shards(model, prefix, module, linears))
            rank = len(module.lora_a.weight) // len(layers)
            for number, (name, rows, columns, _) in enumerate(layers):
                shape = (
                    rows.whole if rows else module.output_size_per_partition,
                    columns.whole if columns else module.input_size_per_partition,
                )
                slots[name] = Slot(rank, number, len(layers), shape)
    return slots
