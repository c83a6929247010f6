"""The `Layout` of a vLLM engine, read off its modules once.

vLLM fuses q, k, v into one parameter and gate, up into another, gives each tensor parallel rank its part of rows or
columns (of experts: the same part of each), and pads the vocabulary.
"""

from collections.abc import Collection, Iterator

import torch
from torch import nn
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from trl_fp8.recipe.names import FUSED, HELD, sent_expert_name
from trl_fp8.recipe.servable import REMEDY
from trl_fp8.sync.adapters import A, B
from trl_fp8.sync.pieces import Layout, Piece, Span

from .cpu.experts import ReferenceUnquantizedExperts


ADAPTERS = {A: "lora_a", B: "lora_b"}  # layers of a linear with room for adapters, see adapters.py


def engine_layout(model: nn.Module, buffers: Collection[str] = ()) -> Layout:
    """Layout of an engine's model. `buffers`: the policy's, by the engine's names; they may be buffers here, too.

    `ValueError` if a kernel rearranges what it is given, so that no sync could write there.
    """
    pieces, seen, packed = [], set(), set()
    for prefix, module in model.named_modules():
        if prefix.rpartition(".")[2] in ADAPTERS.values():
            continue
        if isinstance(module, linear.LinearBase):
            pieces += _adapter_pieces(module, list(shards(model, prefix, module)))
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # a tied output head
                continue
            seen.add(id(parameter))
            if reason := _why_packed(module):
                packed.add(reason)
            else:
                pieces += _pieces(model, prefix, module, attribute)
        for attribute, buffer in module.named_buffers(recurse=False):
            if (name := f"{prefix}.{attribute}") in buffers:
                pieces.append(Piece(name, module, attribute, buffer.dtype))
    if packed:
        raise ValueError(
            f"vLLM's kernels rearrange tensors of this model, where a sync cannot write: {'; '.join(sorted(packed))}. "
            "Remove moe_backend from vllm_engine_kwargs, or choose another model."
        )
    return Layout(pieces)


def _why_packed(module: nn.Module) -> str | None:
    if isinstance(module, RoutedExperts):
        method = module.quant_method
        backend = getattr(method, "fp8_backend", None) or getattr(method, "unquantized_backend", None)
        if getattr(backend, "name", None) != "TRITON" and method.experts_cls is not ReferenceUnquantizedExperts:
            return f"experts are packed or shuffled for {backend}"
        config = getattr(method, "moe_quant_config", None)
        for scale, held in ("w1_scale", f"{HELD[0]}_weight_scale_inv"), ("w2_scale", f"{HELD[1]}_weight_scale_inv"):
            read = getattr(config, scale, None)
            if read is not None and read.data_ptr() != getattr(module, held).data_ptr():
                return f"experts compute with a copy of {held} ({backend})"
    return None


def _pieces(model: nn.Module, prefix: str, module: nn.Module, attribute: str) -> Iterator[Piece]:
    dtype = getattr(module, attribute).dtype
    if isinstance(module, RoutedExperts) and attribute.partition("_weight")[0] in HELD:
        yield _expert_piece(prefix, module, attribute, dtype)
        return
    for name, rows, columns, offset in shards(model, prefix, module):
        if (rows is None and columns is None) or attribute == "weight_scale":
            yield Piece(f"{name}.{attribute}" if name else attribute, module, attribute, dtype)
            continue
        sent, held = (
            (rows, columns),
            (Span(offset, rows.size) if rows else None, None),
        )
        if attribute == "weight_scale_inv":
            sent, held = (
                tuple(span and span.blocks(block) for span, block in zip(spans, module.weight_block_size, strict=True))
                for spans in (sent, held)
            )
        if attribute == "bias":
            sent, held = sent[:1], held[:1]
        per_tensor = getattr(getattr(module, "quant_method", None), "block_quant", True) is False
        transposed = per_tensor and attribute == "weight"
        yield Piece(f"{name}.{attribute}", module, attribute, dtype, sent=sent, held=held, transposed=transposed)


def _expert_piece(prefix: str, module: RoutedExperts, attribute: str, dtype: torch.dtype) -> Piece:
    """w13 `[E, 2I, K]` and w2 `[E, K, I]`, or their scales: this rank has its part of I of every expert."""
    fused, _, kind = attribute.partition("_weight")
    name = f"{prefix.partition('.experts.')[0]}.experts.{sent_expert_name(fused, module.ckpt_gate_proj_name)}{kind}"
    halved = fused == HELD[0]
    size = getattr(module, attribute).shape[1] // 2 if halved else getattr(module, attribute).shape[2]
    sent = None, None, Span(module.moe_config.tp_rank * size, size, module.moe_config.tp_size * size)
    return Piece(name, module, attribute, dtype, sent=sent, halved=halved)


def _adapter_pieces(module: nn.Module, layers: list[tuple[str, Span | None, Span | None, int]]) -> Iterator[Piece]:
    """Where A and B of each of a linear's `layers` (of `shards`) are; nothing if it has no room for any."""
    if (lora_a := getattr(module, ADAPTERS[A], None)) is None:
        return
    rank = len(lora_a.weight) // len(layers)
    for number, (name, rows, columns, offset) in enumerate(layers):
        slot = Span(number * rank, rank)
        dtype, held_rows = lora_a.weight.dtype, Span(offset, rows.size) if rows else None
        yield Piece(f"{name}.{A}.weight", lora_a, "weight", dtype, sent=(None, columns), held=(slot, None))
        yield Piece(f"{name}.{B}.weight", module.lora_b, "weight", dtype, sent=(rows, None), held=(held_rows, None))


def shards(model: nn.Module, prefix: str, module: nn.Module) -> Iterator[tuple[str, Span | None, Span | None, int]]:
    """(checkpoint module, rows of it, columns of it, row offset in the engine's parameter) of each part."""
    if isinstance(module, linear.RowParallelLinear):
        columns = module.input_size_per_partition
        yield prefix, None, Span(module.tp_rank * columns, columns, module.input_size), 0
    elif isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        yield prefix, Span(indices.org_vocab_start_index, indices.num_org_elements, module.org_vocab_size), None, 0
    elif isinstance(module, linear.ColumnParallelLinear):
        parent, _, leaf = prefix.rpartition(".")
        names, sizes, ranks, copies = [leaf], [module.output_size_per_partition], [module.tp_rank], [1]
        if isinstance(module, linear.QKVParallelLinear) and leaf != "qkv":
            names, sizes = FUSED[0], module.output_partition_sizes
            ranks += [module.tp_rank // module.num_kv_head_replicas] * 2
            copies += [module.num_kv_head_replicas] * 2
        elif isinstance(module, linear.MergedColumnParallelLinear):
            names = getattr(model, "packed_modules_mapping", {}).get(leaf, ())  # StableLM's class has no mapping
            sizes = module.output_partition_sizes
            ranks, copies = ranks * len(sizes), copies * len(sizes)
        if len(names) != len(sizes):
            raise RuntimeError(
                f"vLLM's {type(model).__name__} fuses {prefix} from {len(sizes)} parts, its packed_modules_mapping "
                f"names {list(names)}: what is sent cannot be compared with what is held. {REMEDY}."
            )
        offset = 0
        for name, size, rank, same in zip(names, sizes, ranks, copies, strict=True):
            yield f"{parent}.{name}", Span(rank * size, size, module.tp_size // same * size), None, offset
            offset += size
    else:
        yield prefix, None, None, 0
