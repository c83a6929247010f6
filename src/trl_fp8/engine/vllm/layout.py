"""The `Layout` of a vLLM engine, read off its modules once.

vLLM fuses q, k, v into one parameter and gate, up into another, gives each tensor parallel rank its part of rows or
columns (of experts: the same part of each), and pads the vocabulary.
"""

from collections.abc import Collection, Iterator

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from trl_fp8.engine.vllm.cpu.experts import ReferenceUnquantizedExperts
from trl_fp8.recipe.names import FUSED, HELD, sent_expert_name
from trl_fp8.recipe.servable import REMEDY
from trl_fp8.sync.pieces import Layout, Piece, Span


def engine_layout(model: nn.Module, buffers: Collection[str] = ()) -> Layout:
    """The layout of an engine's model; references to its modules, not to its tensors. `RuntimeError` if a module is
    fused from parts that the model's class does not name.

    `buffers` are those of the policy, by the engine's names: there they may be buffers, too.
    """
    pieces, unreadable, seen = {}, {}, set()
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # a tied output head
                continue
            seen.add(id(parameter))
            if reason := _why_unreadable(module):
                unreadable[prefix.partition(".experts.")[0] + ".experts"] = reason
            else:
                pieces |= {piece.name: piece for piece in _pieces(model, prefix, module, attribute)}
        for attribute, buffer in module.named_buffers(recurse=False):
            if (name := f"{prefix}.{attribute}") in buffers:
                pieces[name] = Piece(name, module, attribute, buffer.dtype)
    return Layout(pieces, unreadable)


def _why_unreadable(module: nn.Module) -> str | None:
    if isinstance(module, RoutedExperts):
        method = module.quant_method
        backend = getattr(method, "fp8_backend", None) or getattr(method, "unquantized_backend", None)
        if getattr(backend, "name", None) != "TRITON" and method.experts_cls is not ReferenceUnquantizedExperts:
            return f"experts are packed or shuffled for {backend}"
    return None


def _pieces(model: nn.Module, prefix: str, module: nn.Module, attribute: str) -> Iterator[Piece]:
    of_scales = attribute == "weight_scale_inv"
    per_tensor = getattr(getattr(module, "quant_method", None), "block_quant", True) is False
    dtype = getattr(module, attribute).dtype
    if isinstance(module, RoutedExperts) and attribute.partition("_weight")[0] in HELD:
        yield _expert_piece(prefix, module, attribute, dtype)
        return
    for name, rows, columns, offset in _shards(model, prefix, module):
        if (rows is None and columns is None) or attribute == "weight_scale":
            yield Piece(f"{name}.{attribute}" if name else attribute, module, attribute, dtype)
            continue
        held_rows = Span(offset, rows.size) if rows else None
        spans = (rows, columns), (held_rows, None)
        if of_scales:
            blocks = module.weight_block_size
            spans = tuple(
                tuple(span and span.blocks(block) for span, block in zip(pair, blocks, strict=True)) for pair in spans
            )
        dims = 1 if attribute == "bias" else 2
        options = {"transposed": per_tensor and attribute == "weight"}
        sent, held = spans[0][:dims], spans[1][:dims]
        yield Piece(f"{name}.{attribute}", module, attribute, dtype, sent=sent, held=held, **options)


def _expert_piece(prefix: str, module: RoutedExperts, attribute: str, dtype: torch.dtype) -> Piece:
    """w13 `[E, 2I, K]` and w2 `[E, K, I]`, or their scales: this rank has its part of I of every expert."""
    fused, _, kind = attribute.partition("_weight")
    name = f"{prefix.partition('.experts.')[0]}.experts.{sent_expert_name(fused, module.ckpt_gate_proj_name)}{kind}"
    halved = fused == HELD[0]
    size = getattr(module, attribute).shape[1] // 2 if halved else getattr(module, attribute).shape[2]
    sent = None, None, Span(module.moe_config.tp_rank * size, size)
    return Piece(name, module, attribute, dtype, sent=sent, halved=halved)


def _shards(model: nn.Module, prefix: str, module: nn.Module) -> Iterator[tuple[str, Span | None, Span | None, int]]:
    """(checkpoint module, rows of it, columns of it, row offset in the engine's parameter) of each part."""
    parent, _, leaf = prefix.rpartition(".")
    if isinstance(module, QKVParallelLinear):
        kv_rank = module.tp_rank // module.num_kv_head_replicas
        parts = [
            (module.num_heads * module.head_size, module.tp_rank),
            (module.num_kv_heads * module.head_size, kv_rank),
            (module.num_kv_heads * module.v_head_size, kv_rank),
        ]
        sizes = [(name, *part) for name, part in zip(FUSED[0], parts, strict=True)]
    elif isinstance(module, MergedColumnParallelLinear):
        names = getattr(model, "packed_modules_mapping", {}).get(leaf, ())  # StableLM's class, for one, has no mapping
        if len(names) != len(module.output_partition_sizes):
            parts = len(module.output_partition_sizes)
            raise RuntimeError(
                f"vLLM's {type(model).__name__} fuses {prefix} from {parts} parts, and its packed_modules_mapping "
                f"names {list(names)}: what is sent cannot be compared with what is held. {REMEDY}."
            )
        sizes = [(name, size, module.tp_rank) for name, size in zip(names, module.output_partition_sizes, strict=True)]
    elif isinstance(module, RowParallelLinear):
        columns = module.input_size_per_partition
        yield prefix, None, Span(module.tp_rank * columns, columns), 0
        return
    elif isinstance(module, ColumnParallelLinear):
        sizes = [(leaf, module.output_size_per_partition, module.tp_rank)]
    elif isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        yield prefix, Span(indices.org_vocab_start_index, indices.num_org_elements), None, 0
        return
    else:
        yield prefix, None, None, 0
        return
    offset = 0
    for name, size, rank in sizes:
        yield f"{parent}.{name}", Span(rank * size, size), None, offset
        offset += size
