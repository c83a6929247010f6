"""Room for LoRA adapters in an engine: two of vLLM's linear layers, A and B, inside each linear layer with adapters.

    y = Q(W) x + B (A x)        each product is rounded to BF16, as vLLM's LoRA kernels do, before the sum

`adapters_installed` adds these layers to engines that start inside its block, and `slots_of` says which policy layer
has which part of them (`Slot`).

vLLM's own LoRA is not used. It chooses an adapter for each token, renames the layers, and needs kernels that get the
adapter of each token of a batch. Here one adapter serves all tokens, so A and B are ordinary unquantized linear
layers. They run on the engine's kernels for such layers, and are batch invariant if these kernels are. vLLM compiles A
and B and captures them in CUDA graphs, a trainer with one forward calls them, and syncs write and audit their tensors.
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
        layers: This rank's part of each of the policy's layers that vLLM fuses into the linear layer.
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
            # Spans of rows and columns: this rank's part of the matrix that a sync sends, and its place in this matrix
            if self.which == A:  # the rows of a layer's A lie below the rows of the previous layer's A
                sent = (None, columns)
                in_engine = (Span(slot.index * slot.rank, slot.rank), None)
            else:  # a sync sends a layer's B with zeros in the other layers' columns, so B fills whole rows
                sent = (rows, None)
                in_engine = (Span(offset, rows.size) if rows else None, None)
            piece_name = f"{name}.{self.which}.weight"
            yield Piece(piece_name, self, "weight", self.weight.dtype, sent=sent, in_engine=in_engine)

    def facts(self) -> dict[str, list]:
        if self.which == B:  # the layer of A reports the same slots
            return {}
        return {name: list(astuple(slot)) for name, slot in self.slots.items()}


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
    """Add A and B to the linear layers of `model` that compute the layers in `ranks`.

    `ValueError` if no linear layer computes one of the layers in `ranks`.
    """
    missing = set(ranks)
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, LinearBase):
            continue
        layers = list(shards(model, prefix, module, linears))
        names = [name for name, *_ in layers]
        rank = max((ranks.get(name, 0) for name in names), default=0)  # R of this linear layer
        if rank == 0:
            continue
        missing -= set(names)
        inputs = module.input_size_per_partition
        outputs = module.output_size_per_partition
        slots = {}
        for index, (name, rows, columns, _) in enumerate(layers):
            # The shape of the whole layer. This rank may compute a part of the layer
            shape = (rows.whole if rows else outputs, columns.whole if columns else inputs)
            own_rank = ranks.get(name, 0)
            slots[name] = Slot(rank=rank, index=index, fused=len(layers), shape=shape, own_rank=own_rank)
        width = len(layers) * rank  # S R
        module.add_module(ADAPTERS[A], AdapterLinear(A, layers, slots, shape=(inputs, width), prefix=prefix))
        module.add_module(ADAPTERS[B], AdapterLinear(B, layers, slots, shape=(width, outputs), prefix=prefix))
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
    """Return the slots in an engine's model, by the engine's name of the policy's layer."""
    slots = {}
    for module in model.modules():
        if isinstance(module, AdapterLinear):
            slots |= module.slots
    return slots
