"""Room for LoRA adapters in an engine: two of vLLM's linear layers, A and B, inside each linear layer with adapters.

    y = Q(W) x + B (A x)        each product is rounded to BF16, as vLLM's LoRA kernels do, before the sum

vLLM's own LoRA is not used. It chooses an adapter for each token, renames the layers, and needs kernels that get the
adapter of each token of a batch. Here one adapter serves all tokens, so A and B are unquantized linear layers like any
other. They run on the same kernels, batch invariant if the engine's are. vLLM compiles them and captures them in CUDA
graphs, a trainer with one forward calls them, and syncs write and audit their tensors.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple
from functools import cache

from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, QuantizeMethodBase, ReplicatedLinear
from vllm.model_executor.model_loader import base_loader

from trl_fp8.engine.vllm.layout import Added, Shard, shards
from trl_fp8.sync.pieces import Piece, Span
from trl_fp8.upstream.patches import substituted

from .adapter_tensors import A, B, Slot


ADAPTERS = {A: "lora_a", B: "lora_b"}  # names of the two layers inside a linear layer with adapters


class _WithAdapter:
    """Mixin for the `quant_method` of a linear layer: adds B (A x) to the layer's output."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = super().apply(layer, x, bias)
        return y + layer.lora_b(layer.lora_a(x))


class AdapterLinear(ReplicatedLinear, Added):
    """The matrix A, or B, inside one vLLM linear layer, for all of the policy's layers that vLLM fuses there.

    Args:
        which: `A` or `B`.
        layers: This rank's part of each of the policy's layers.
        slots: Engine's name of each of these layers -> its slot (adapter_tensors.py).
        shape: In-features and out-features of this matrix on this rank.
        prefix: The engine's name of the linear layer.
    """

    def __init__(self, which: str, layers: list[Shard], slots: dict[str, Slot], shape: tuple[int, int], prefix: str):
        inputs, outputs = shape
        options = {"bias": False, "return_bias": False, "disable_tp": True}
        super().__init__(inputs, outputs, prefix=f"{prefix}.{ADAPTERS[which]}", **options)
        self.which = which
        self.layers = layers
        self.slots = slots

    def pieces(self) -> Iterator[Piece]:
        for name, rows, columns, offset in self.layers:
            slot = self.slots[name]
            if self.which == A:  # rows of a layer's A lie below those of the layer before
                sent = (None, columns)
                in_engine = (Span(slot.index * slot.rank, slot.rank), None)
            else:  # a sync sends a layer's B with zeros in the other layers' columns, so it fills whole rows
                sent = (rows, None)
                in_engine = (Span(offset, rows.size) if rows else None, None)
            piece_name = f"{name}.{self.which}.weight"
            yield Piece(piece_name, self, "weight", self.weight.dtype, sent=sent, in_engine=in_engine)

    def facts(self) -> dict[str, list]:
        if self.which == B:  # the layer of A reports the same slots
            return {}
        return {name: [*astuple(slot)] for name, slot in self.slots.items()}


def adapters_installed(linears: Collection[str], ranks: Mapping[str, int]) -> AbstractContextManager[None]:
    """Add adapter layers to engines that start inside the block.

    Args:
        linears: The engine's names of all the policy's linear layers.
        ranks: Engine's name of each layer with an adapter -> the adapter's rank.
    """
    initialize_model = base_loader.initialize_model

    def initialize_with_adapters(vllm_config: VllmConfig, **kwargs) -> nn.Module:
        model = initialize_model(vllm_config=vllm_config, **kwargs)
        with set_current_vllm_config(vllm_config):
            _install(model, linears, ranks)
        return model

    return substituted(base_loader, "initialize_model", initialize_with_adapters)


def _install(model: nn.Module, linears: Collection[str], ranks: Mapping[str, int]) -> None:
    """Add A and B to the linear layers of `model` that compute the layers in `ranks`; `ValueError` if any has none."""
    missing = set(ranks)
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, LinearBase):
            continue
        layers = list(shards(model, prefix, module, linears))
        names = [name for name, *_ in layers]
        rank = max((ranks.get(name, 0) for name in names), default=0)  # R of this linear layer
        if rank:
            missing -= set(names)
            width = len(layers) * rank  # S R
            slots = {}
            for index, (name, rows, columns, _) in enumerate(layers):
                # The shape of the whole layer. This rank may compute a part of it
                shape = (
                    rows.whole if rows else module.output_size_per_partition,
                    columns.whole if columns else module.input_size_per_partition,
                )
                slots[name] = Slot(rank, index, len(layers), shape, ranks.get(name, 0))
            shapes = {A: (module.input_size_per_partition, width), B: (width, module.output_size_per_partition)}
            for which, shape in shapes.items():
                module.add_module(ADAPTERS[which], AdapterLinear(which, layers, slots, shape, prefix))
            # Replace the method by one with the same attributes, whose class also has `_WithAdapter`
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
    """Return a subclass of `_WithAdapter` and `cls`."""
    return type(cls.__name__, (_WithAdapter, cls), {"__module__": cls.__module__})


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """Return engine's name of a policy's layer -> its slot, for all layers with slots in an engine's model."""
    slots = {}
    for module in model.modules():
        if isinstance(module, AdapterLinear):
            slots |= module.slots
    return slots
