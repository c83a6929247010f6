"""Room for LoRA adapters in an engine: two linear layers of vLLM's own beside each linear that has them.

    y = Q(W) x + B (A x)        each product rounded to BF16, as vLLM's LoRA kernels do, and added

vLLM's LoRA would choose an adapter for each token, in layers of other names, with kernels that need to know
every batch. Here one adapter serves all tokens. A and B are unquantized linears like any other: the same kernels run
them (batch invariant where those are), they are compiled, captured in graphs and called by a trainer, and their
tensors are written, audited and sealed.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache

from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, QuantizeMethodBase, ReplicatedLinear
from vllm.model_executor.model_loader import base_loader

from trl_fp8.engine.vllm.layout import Added, Shard, shards
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.pieces import Piece, Span
from trl_fp8.upstream.patches import substituted

from .adapter_tensors import A, B, Slot


ADAPTERS = {A: "lora_a", B: "lora_b"}  # what a linear with room for adapters calls the layers that hold them


class _WithAdapter:
    """Mixin for a linear layer's method: adds B (A x) to its output."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = super().apply(layer, x, bias)
        return y + layer.lora_b(layer.lora_a(x))


class AdapterLinear(ReplicatedLinear, Added):
    """A, or B, of the adapters of one vLLM linear, which computes all `layers` of the policy. All have one rank."""

    def __init__(self, which: str, layers: list[Shard], rank: int, shape: tuple[int, int], prefix: str):
        inputs, outputs = shape
        options = {"bias": False, "return_bias": False, "disable_tp": True}
        super().__init__(inputs, outputs, prefix=f"{prefix}.{ADAPTERS[which]}", **options)
        self.which = which
        self.layers = layers
        self.rank = rank

    def pieces(self) -> Iterator[Piece]:
        for number, (name, rows, columns, offset) in enumerate(self.layers):
            if self.which == A:
                places = {"sent": (None, columns), "in_engine": (Span(number * self.rank, self.rank), None)}
            else:
                places = {"sent": (rows, None), "in_engine": (Span(offset, rows.size) if rows else None, None)}
            yield Piece(f"{name}.{self.which}.weight", self, "weight", self.weight.dtype, **places)


def adapters_installed(recipe: FP8Recipe, ranks: Mapping[str, int]) -> AbstractContextManager[None]:
    """Make room for adapters of these ranks, by policy layer, in engines that start inside the block."""
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
        layers = list(shards(model, prefix, module, linears))
        names = [name for name, *_ in layers]
        rank = max((ranks.get(name, 0) for name in names), default=0)
        if rank:
            missing -= set(names)
            width = len(layers) * rank
            shapes = {A: (module.input_size_per_partition, width), B: (width, module.output_size_per_partition)}
            for which, shape in shapes.items():
                module.add_module(ADAPTERS[which], AdapterLinear(which, layers, rank, shape, prefix))
            # An instance of the same class, and of `_WithAdapter` before it, with the same attributes
            method = object.__new__(_with_adapter(type(module.quant_method)))
            vars(method).update(vars(module.quant_method))
            module.quant_method = method
    if missing:
        raise ValueError(
            f"fp8_base=True: the engine's {type(model).__name__} has no linear layer for adapters of "
            f"{', '.join(sorted(missing)[:6])}. Take them out of target_modules, or set fp8_base=False."
        )


@cache
def _with_adapter(cls: type[QuantizeMethodBase]) -> type[QuantizeMethodBase]:
    return type(cls.__name__, (_WithAdapter, cls), {"__module__": cls.__module__})


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """Return each slot, by the name that the policy's layer has in the engine."""
    slots = {}
    for module in model.modules():
        added = getattr(module, ADAPTERS[A], None)
        for number, (name, rows, columns, _) in enumerate(added.layers if added is not None else ()):
            shape = (
                rows.whole if rows else module.output_size_per_partition,
                columns.whole if columns else module.input_size_per_partition,
            )
            slots[name] = Slot(added.rank, number, len(added.layers), shape)
    return slots
