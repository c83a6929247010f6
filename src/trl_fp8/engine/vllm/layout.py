"""The `Layout` of a vLLM engine, read off its modules once.

vLLM fuses q, k, v into one parameter and gate, up into another. Each tensor parallel rank has its part of the rows or
columns, of experts the same part of each. The vocabulary is padded. For the decoding of MLA vLLM keeps two parts of
kv_b_proj in another order, which are computed from what a sync wrote.
"""

from collections.abc import Collection, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torchao.quantization import Float8Tensor
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from trl_fp8.quantization.codec.kv_scales import QKV
from trl_fp8.quantization.codec.weights import held_weight
from trl_fp8.quantization.formats import BLOCKS, FormatSpec
from trl_fp8.recipe.names import FUSED, HELD, PARTS, sent_expert_name
from trl_fp8.recipe.servable import REMEDY
from trl_fp8.sync.pieces import Joined, Layout, Piece, Span

from .numerics import UNTILED_SCALE, linear_format, tiled_scale


# Checkpoint module, rows of it, columns of it, row offset in the engine's parameter
Shard = tuple[str, Span | Joined | None, Span | None, int]
SCALES = tuple(f"_{which}_scale" for which in QKV)  # of vLLM's attention modules
SINKS = "sinks"  # of attention heads, a parameter of vLLM's attention module itself


class Added(nn.Module):
    """Base of layers that a part of the engine adds to vLLM's model. The policy has no names for them."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the places of its tensors, by the names under which a sync sends them."""
        raise NotImplementedError


def engine_layout(model: nn.Module, linears: Collection[str], buffers: Collection[str] = ()) -> Layout:
    """Return the layout of an engine's model, without `Added` layers.

    `linears` and `buffers` are the policy's, by the engine's names. Projections that are one linear in the policy are
    one piece. `ValueError` if a kernel rearranges its tensors, so that no sync could write there.
    """
    pieces, seen, packed = [], set(), set()
    for prefix, module in model.named_modules():
        if isinstance(module, Added):
            continue
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # a tied output head
                continue
            seen.add(id(parameter))
            if reason := _why_packed(module):
                packed.add(reason)
            elif isinstance(module, MLAAttention):
                pieces.append(_absorbed_piece(prefix, module, attribute))
            else:
                pieces += _pieces(list(shards(model, prefix, module, linears)), prefix, module, attribute)
        for attribute, buffer in module.named_buffers(recurse=False):
            if (name := f"{prefix}.{attribute}") in buffers:
                pieces.append(Piece(name, module, attribute, buffer.dtype))
    if packed:
        raise ValueError(
            f"vLLM's kernels rearrange tensors of this model, where a sync cannot write: {'; '.join(sorted(packed))}. "
            "Remove moe_backend and attention_backend from vllm_engine_kwargs, or choose another model."
        )
    return Layout(pieces)


def constants_layout(model: nn.Module, layout: Layout) -> Layout:
    """Return the layout of the buffers that no sync writes: those outside of `layout`, without KV scales."""
    written = {(id(piece.module), piece.attribute) for piece in layout.pieces.values()}
    return Layout(
        Piece(f"{prefix}.{attribute}" if prefix else attribute, module, attribute, buffer.dtype)
        for prefix, module in model.named_modules()
        for attribute, buffer in module.named_buffers(recurse=False)
        if (id(module), attribute) not in written and attribute not in SCALES
    )


def held_codes(layout: Layout, name: str, spec: FormatSpec) -> Float8Tensor | None:
    """Return views of an engine's FP8 weight `[N, K]` or `[E, N, K]`; None if it is not FP8."""
    scale = layout.held.get(name + spec.scale_suffix)
    return None if scale is None else held_weight(layout.held[name], scale, spec)


def _why_packed(module: nn.Module) -> str | None:
    if isinstance(module, RoutedExperts):
        method = module.quant_method
        backend = getattr(method, "fp8_backend", None) or getattr(method, "unquantized_backend", None)
        as_loaded = getattr(backend, "name", None) == "TRITON" or getattr(method.experts_cls, "keeps_weights", False)
        if not as_loaded:
            return f"experts are packed or shuffled for {backend}"
        config = getattr(method, "moe_quant_config", None)
        for number, kind in product((0, 1), (("scale", BLOCKS.scale_attribute), ("bias", "bias"))):
            read = getattr(config, f"w{number + 1}_{kind[0]}", None)
            written = f"{HELD[number]}_{kind[1]}"
            if read is not None and read.data_ptr() != getattr(module, written).data_ptr():
                return f"experts compute with a copy of {written} ({backend})"
    sinks = getattr(module, SINKS, None)
    if isinstance(sinks, nn.Parameter) and module.attn.impl.sinks is not sinks:
        return f"attention computes with a copy of {SINKS} ({type(module.attn.impl).__name__})"
    return None


def _pieces(parts: list[Shard], prefix: str, module: nn.Module, attribute: str) -> Iterator[Piece]:
    dtype, spec = getattr(module, attribute).dtype, linear_format(module)
    if isinstance(module, RoutedExperts) and attribute.partition("_")[0] in HELD:
        yield _expert_piece(prefix, module, attribute, dtype)
        return
    if spec is not None and attribute == spec.scale_attribute and hasattr(module, UNTILED_SCALE):
        derived = partial(tiled_scale, module)
        yield Piece(f"{prefix}.{attribute} in tiles", module, attribute, dtype, derived=derived)
        return
    if attribute == SINKS:
        size, attention = len(module.sinks), module.qkv_proj
        span = Span(attention.tp_rank * size, size, attention.tp_size * size)
        yield Piece(f"{prefix}.{attribute}", module, attribute, dtype, sent=(span,))
        return
    for policy_name, rows, columns, offset in parts:
        name = f"{policy_name}.{attribute}" if policy_name else attribute
        is_scale = spec is not None and attribute in (spec.scale_attribute, UNTILED_SCALE)
        if is_scale:
            name = f"{policy_name}.{spec.scale_attribute}"
        if (rows is None and columns is None) or (is_scale and not spec.weight_block):
            yield Piece(name, module, attribute, dtype)
            continue
        sent = rows, columns
        in_engine = Span(offset, rows.size) if rows else None, None
        if is_scale:
            sent = _scale_spans(sent, spec)
            in_engine = _scale_spans(in_engine, spec)
        if attribute == "bias":
            sent, in_engine = sent[:1], in_engine[:1]
        has_transposed = spec is not None and spec.weight_transposed
        equal = None
        if not has_transposed and _splits_equal_parts(rows, module):
            # Gate and up of 512 rows each, on rank 0 of 2: the checkpoint's [1024, K] is viewed as [2, 512, K], of
            # which this rank has [:, 0:256]. A view of it equals the parameter [512, K] viewed as [2, 256, K]
            equal = 0, len(rows.parts)
            sent = None, sent[0].parts[0], *sent[1:]
            in_engine = ()
        transposed = has_transposed and attribute == "weight"
        yield Piece(name, module, attribute, dtype, sent, in_engine, equal=equal, transposed=transposed)


def _scale_spans(spans: tuple[Span | Joined | None, ...], spec: FormatSpec) -> tuple[Span | Joined | None, ...]:
    """Return the spans of a weight's scales, one for each of the format's blocks."""
    blocks = zip(spans, spec.weight_block, strict=True)
    return tuple(span.blocks(block) if span is not None else None for span, block in blocks)


def _splits_equal_parts(rows: Span | Joined | None, module: nn.Module) -> bool:
    """Return whether `rows` are a rank's part of each of several equal parts, and all that the module holds."""
    return (
        isinstance(rows, Joined)
        and rows.size != rows.whole
        and rows.size == module.output_size_per_partition
        and len(set(rows.parts)) == 1
    )


def _expert_piece(prefix: str, module: RoutedExperts, attribute: str, dtype: torch.dtype) -> Piece:
    """Return the piece of w13 `[E, 2I, K]`, w2 `[E, K, I]` or their scales: this rank's part of I of every expert.
    Biases are `[E, 2I]` and `[E, K]`; only the first rank adds that of w2.
    """
    fused, _, kind = attribute.partition("_")
    kind = f"_{kind}".removeprefix("_weight")
    name = f"{prefix.partition('.experts.')[0]}.experts.{sent_expert_name(fused, module.ckpt_gate_proj_name)}{kind}"
    interleaved = isinstance(module, GptOssRoutedExperts)  # gate and up, row by row; sent transposed
    is_first = fused == HELD[0]
    rank, ranks = module.moe_config.tp_rank, module.moe_config.tp_size
    halved = is_first and not interleaved
    dim = 1 if is_first else 2
    if kind == "_bias" and not is_first:
        return Piece(name, module, attribute, dtype, zero=rank > 0)
    size = getattr(module, attribute).shape[dim] // (1 + halved)
    sent = (None,) * (dim + halved) + (Span(rank * size, size, ranks * size),)
    transposed = interleaved and not kind
    return Piece(
        name, module, attribute, dtype, sent=sent, equal=(1, 2) if halved else None, sent_transposed=transposed
    )


def _absorbed_piece(prefix: str, attention: MLAAttention, attribute: str) -> Piece:
    """Return the piece of `W_UK_T` `[H, D, R]` or `W_UV` `[H, R, D]`, with H heads of size D and a latent of size R.
    Unquantized ones are views of kv_b_proj's own memory: a checksum reads them in that order.
    """
    if attribute not in ("W_UK_T", "W_UV"):
        raise RuntimeError(f"vLLM derives {prefix}.{attribute}, of which is not known how. {REMEDY}.")
    tensor = getattr(attention, attribute)
    transposed = tensor.stride(-1) != 1

    def derived() -> Tensor:
        sizes = attention.kv_lora_rank, attention.num_heads, attention.qk_nope_head_dim, attention.v_head_dim
        key_RHD, value_RHD = split_kv_b_proj(attention.kv_b_proj, tensor.dtype, *sizes)
        part = key_RHD.permute(1, 2, 0) if attribute == "W_UK_T" else value_RHD.transpose(0, 1)
        return part.mT if transposed else part

    return Piece(f"{prefix}.{attribute}", attention, attribute, tensor.dtype, transposed=transposed, derived=derived)


def shards(model: nn.Module, prefix: str, module: nn.Module, linears: Collection[str]) -> Iterator[Shard]:
    """Yield the part of each of the policy's layers that `module` holds. `linears`: as for `engine_layout`."""
    if isinstance(module, linear.RowParallelLinear):
        columns = module.input_size_per_partition
        yield prefix, None, Span(module.tp_rank * columns, columns, module.input_size), 0
    elif isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        yield prefix, Span(indices.org_vocab_start_index, indices.num_org_elements, module.org_vocab_size), None, 0
    elif isinstance(module, MiniMaxText01RMSNormTP):
        size = len(module.weight)
        yield prefix, Span(module.weight_shard_rank * size, size, module.weight_shard_world * size), None, 0
    elif isinstance(module, GatedDeltaNetAttention):
        heads = module.num_v_heads // module.tp_size
        yield prefix, Span(module.tp_rank * heads, heads, module.num_v_heads), None, 0
    elif isinstance(module, linear.ColumnParallelLinear):
        parent, _, leaf = prefix.rpartition(".")
        rank, ranks = module.tp_rank, module.tp_size
        is_one = prefix in linears
        if isinstance(module, linear.QKVParallelLinear):
            names, sizes, copies = FUSED["qkv_proj"], module.output_partition_sizes, module.num_kv_head_replicas
            spans = _dealt(sizes[:1], rank, ranks) + _dealt(sizes[1:], rank // copies, ranks // copies)
        elif isinstance(module, linear.MergedColumnParallelLinear):
            names = getattr(model, "packed_modules_mapping", FUSED).get(leaf, ())  # StableLM's class has no mapping
            sizes = module.output_partition_sizes
            spans = _dealt(sizes, rank, ranks)
        elif isinstance(net := model.get_submodule(parent), GatedDeltaNetAttention):  # a convolution of q, k and v
            sizes = [size // net.tp_size for size in (net.key_dim, net.key_dim, net.value_dim)]
            is_one = True
            spans = _dealt(sizes, rank, ranks)
        else:
            names, sizes = [leaf], [module.output_size_per_partition]
            spans = _dealt(sizes, rank, ranks)
        if is_one:
            yield prefix, _joined(spans), None, 0
            return
        if sum(PARTS.get(name, 1) for name in names) != len(sizes):
            raise RuntimeError(
                f"vLLM's {type(model).__name__} fuses {prefix} from {len(sizes)} parts, its packed_modules_mapping "
                f"names {list(names)}: what is sent cannot be compared with what is held. {REMEDY}."
            )
        offset, first = 0, 0
        for name in names:
            end = first + PARTS.get(name, 1)
            rows = _joined(spans[first:end])
            yield f"{parent}.{name}", rows, None, offset
            offset, first = offset + rows.size, end
    else:
        yield prefix, None, None, 0


def _dealt(sizes: list[int], rank: int, ranks: int) -> list[Span]:
    """Return the spans of `rank` in parts of which each of `ranks` ranks has `sizes` rows."""
    return [Span(rank * size, size, ranks * size) for size in sizes]


def _joined(spans: list[Span]) -> Span | Joined:
    return Joined(tuple(spans)) if len(spans) > 1 else spans[0]
