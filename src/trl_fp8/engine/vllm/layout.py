"""The `Layout` (sync/pieces.py) of a vLLM engine, read off its modules once.

vLLM fuses q, k, v into one parameter and gate, up into another. Each tensor parallel rank has a part of the rows or
columns of a weight, and the same part of every expert. vLLM pads the vocabulary. To decode with MLA it also keeps both
parts of kv_b_proj in another order. These copies are *derived*: computed from the weight that a sync wrote.

`engine_layout` visits each parameter of each module:

    _why_packed             refuses a module whose kernel rearranges tensors
    _absorbed_piece         makes the piece of a derived copy of kv_b_proj
    _pieces_of_parameter    makes the pieces of any other parameter, one for each tensor of the policy in it, with
        _expert_piece           for weights, scales and biases of experts
        shards                  for most other modules: which rows and columns of which layers they hold on this rank
"""

from collections.abc import Collection, Iterator
from functools import partial

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


# What a module holds of one layer of the policy: the layer's name, this rank's rows and columns of the layer's weight
# (None: all), and the row of the engine's parameter at which these rows begin
Shard = tuple[str, Span | Joined | None, Span | None, int]
SCALES = tuple(f"_{which}_scale" for which in QKV)  # buffers of vLLM's attention modules
SINKS = "sinks"  # parameter of vLLM's attention module: the sinks of its heads


class Added(nn.Module):
    """Base of layers that an `EnginePart` adds to vLLM's model. The policy has no such layers."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the layer's tensors, under the names by which a sync sends them."""
        raise NotImplementedError

    def facts(self) -> dict[str, list]:
        """Return facts about the layer for a server to tell the trainer. The class of the layer names the facts."""
        return {}


def engine_layout(model: nn.Module, linears: Collection[str], buffers: Collection[str] = ()) -> Layout:
    """Return the layout of an engine's model, without `Added` layers.

    `linears` and `buffers` are the policy's linears and buffers, by their names in the engine. Projections that vLLM
    fuses are one piece if the policy has them as one linear, too, and otherwise one piece each. Raises `ValueError` if
    a kernel rearranges its tensors, because a sync could not write these tensors.
    """
    pieces = []
    seen = set()  # ids of parameters
    packed = set()  # reasons why a sync could not write some of the tensors
    for prefix, module in model.named_modules():
        if isinstance(module, Added):
            continue
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # an output head that is tied to the embeddings
                continue
            seen.add(id(parameter))
            reason = _why_packed(module)
            if reason:
                packed.add(reason)
            elif isinstance(module, MLAAttention):
                pieces.append(_absorbed_piece(prefix, module, attribute))
            else:
                pieces += _pieces_of_parameter(model, linears, prefix, module, attribute)
        for attribute, buffer in module.named_buffers(recurse=False):
            name = f"{prefix}.{attribute}"
            if name in buffers:
                pieces.append(Piece(name, module, attribute, buffer.dtype))
    if packed:
        raise ValueError(
            f"vLLM's kernels rearrange tensors of this model, where a sync cannot write: {'; '.join(sorted(packed))}. "
            "Remove moe_backend and attention_backend from vllm_engine_kwargs, or choose another model."
        )
    return Layout(pieces)


def constants_layout(model: nn.Module, layout: Layout) -> Layout:
    """Return the layout of the buffers that no sync writes: all buffers that are not in `layout`, except KV scales."""
    written = {(id(piece.module), piece.attribute) for piece in layout.pieces.values()}
    pieces = []
    for prefix, module in model.named_modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            if (id(module), attribute) in written or attribute in SCALES:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            pieces.append(Piece(name, module, attribute, buffer.dtype))
    return Layout(pieces)


def held_codes(layout: Layout, name: str, spec: FormatSpec) -> Float8Tensor | None:
    """Return codes and scales of an engine's FP8 weight `[N, K]` or `[E, N, K]`, as views of the engine's tensors.

    Returns None if the weight is not FP8.
    """
    scale = layout.held.get(name + spec.scale_suffix)
    if scale is None:
        return None
    return held_weight(layout.held[name], scale, spec)


def _why_packed(module: nn.Module) -> str | None:
    """Return why a sync could not write a module's tensors; None if a sync can write them."""
    if isinstance(module, RoutedExperts):
        method = module.quant_method
        backend = getattr(method, "fp8_backend", None) or getattr(method, "unquantized_backend", None)
        is_triton = getattr(backend, "name", None) == "TRITON"
        experts_class = getattr(method, "experts_cls", None)
        is_reference = getattr(experts_class, "keeps_weights", False)  # of the CPU engine
        if not (is_triton or is_reference):
            return f"experts are packed or shuffled for {backend}"
        # The kernel reads scales and biases from `config`, where they may be copies of the module's parameters
        config = getattr(method, "moe_quant_config", None)
        for kernel_weight, weight in ("w1", HELD[0]), ("w2", HELD[1]):
            for kernel_kind, kind in ("scale", BLOCKS.scale_attribute), ("bias", "bias"):
                read = getattr(config, f"{kernel_weight}_{kernel_kind}", None)
                if read is None:  # the kernel has no such tensor
                    continue
                written = getattr(module, f"{weight}_{kind}")
                if read.data_ptr() != written.data_ptr():
                    return f"experts compute with a copy of {weight}_{kind} ({backend})"
    sinks = getattr(module, SINKS, None)
    if isinstance(sinks, nn.Parameter) and module.attn.impl.sinks is not sinks:
        return f"attention computes with a copy of {SINKS} ({type(module.attn.impl).__name__})"
    return None


def _pieces_of_parameter(
    model: nn.Module, linears: Collection[str], prefix: str, module: nn.Module, attribute: str
) -> Iterator[Piece]:
    """Yield the pieces of a module's parameter, one for each tensor of the policy in it. `prefix` names the module."""
    dtype = getattr(module, attribute).dtype
    spec = linear_format(module)

    # 1. Parameters of experts, tiled scales and sinks: one piece each
    if isinstance(module, RoutedExperts) and attribute.partition("_")[0] in HELD:
        yield _expert_piece(prefix, module, attribute, dtype)
        return
    if spec is not None and attribute == spec.scale_attribute and hasattr(module, UNTILED_SCALE):
        derived = partial(tiled_scale, module)  # a sync writes `UNTILED_SCALE`
        yield Piece(f"{prefix}.{attribute} in tiles", module, attribute, dtype, derived=derived)
        return
    if attribute == SINKS:
        heads = len(module.sinks)
        span = Span(module.qkv_proj.tp_rank * heads, heads, module.qkv_proj.tp_size * heads)
        yield Piece(f"{prefix}.{attribute}", module, attribute, dtype, sent=(span,))
        return

    # 2. All other parameters: one piece for each shard
    is_scale = spec is not None and attribute in (spec.scale_attribute, UNTILED_SCALE)
    sent_attribute = spec.scale_attribute if is_scale else attribute
    has_transposed_weight = spec is not None and spec.weight_transposed
    for policy_name, rows, columns, offset in shards(model, prefix, module, linears):
        name = f"{policy_name}.{sent_attribute}" if policy_name else sent_attribute
        has_whole_weight = rows is None and columns is None
        is_single_scale = is_scale and not spec.weight_block  # one scale for the whole weight, on every rank
        if has_whole_weight or is_single_scale:
            yield Piece(name, module, attribute, dtype)
            continue
        # The part's spans in the checkpoint tensor and in the engine's parameter, as rows and columns of a weight
        sent = (rows, columns)
        in_engine = (None if rows is None else Span(offset, rows.size), None)
        if is_scale:
            sent = _scale_spans(sent, spec)
            in_engine = _scale_spans(in_engine, spec)
        if attribute == "bias":  # has rows only
            sent = sent[:1]
            in_engine = in_engine[:1]
        equal = None
        if not has_transposed_weight and _splits_equal_parts(rows, module):
            # For example gate and up of 512 rows each, on rank 0 of 2: the checkpoint's [1024, K] is viewed as
            # [2, 512, K], of which this rank has [:, 0:256]. The parameter [512, K] is viewed as [2, 256, K]. So the
            # part is one view of the checkpoint's tensor, and needs no copy
            equal = 0, len(rows.parts)
            span_in_each = sent[0].parts[0]
            sent = (None, span_in_each, *sent[1:])
            in_engine = ()
        transposed = has_transposed_weight and attribute == "weight"
        yield Piece(name, module, attribute, dtype, sent=sent, in_engine=in_engine, equal=equal, transposed=transposed)


def _scale_spans(spans: tuple[Span | Joined | None, ...], spec: FormatSpec) -> tuple[Span | Joined | None, ...]:
    """Return the spans of a weight's scales, one scale per block of the format, from the spans of the weight."""
    spans_in_blocks = []
    for span, block in zip(spans, spec.weight_block, strict=True):
        spans_in_blocks.append(None if span is None else span.blocks(block))
    return tuple(spans_in_blocks)


def _splits_equal_parts(rows: Span | Joined | None, module: nn.Module) -> bool:
    """Return whether `rows` are the same span in each of several equal parts, and fill the module's parameter."""
    return (
        isinstance(rows, Joined)
        and rows.size != rows.whole
        and rows.size == module.output_size_per_partition
        and len(set(rows.parts)) == 1
    )


def _expert_piece(prefix: str, module: RoutedExperts, attribute: str, dtype: torch.dtype) -> Piece:
    """Return the piece of experts' w13 `[E, 2I, K]` or w2 `[E, K, I]`, or of their scales or biases.

    This rank has a part of the I rows or columns. Biases are `[E, 2I]` and `[E, K]`; only the first rank holds and
    adds the bias of w2.
    """
    fused, _, rest = attribute.partition("_")
    suffix = f"_{rest}".removeprefix("_weight")  # of the checkpoint tensor's name; empty for a weight
    layer = prefix.partition(".experts.")[0]
    name = f"{layer}.experts.{sent_expert_name(fused, module.ckpt_gate_proj_name)}{suffix}"
    rank, ranks = module.moe_config.tp_rank, module.moe_config.tp_size
    is_w2 = fused == HELD[1]
    if is_w2 and suffix == "_bias":
        return Piece(name, module, attribute, dtype, zero=rank > 0)
    # GPT-OSS: rows of gate and up alternate, and the checkpoint's weight is transposed
    is_interleaved = isinstance(module, GptOssRoutedExperts)
    # The dim that is divided over the ranks, and its size on this rank
    shape = getattr(module, attribute).shape
    equal = None
    if is_w2:
        dim, size = 2, shape[2]
    elif is_interleaved:
        dim, size = 1, shape[1]
    else:  # all of gate, then all of up: dim 1 is viewed as [2, I], in which I is dim 2
        equal = 1, 2
        dim, size = 2, shape[1] // 2
    undivided = (None,) * dim
    sent = (*undivided, Span(rank * size, size, ranks * size))
    sent_transposed = is_interleaved and suffix == ""
    return Piece(name, module, attribute, dtype, sent=sent, equal=equal, sent_transposed=sent_transposed)


def _absorbed_piece(prefix: str, attention: MLAAttention, attribute: str) -> Piece:
    """Return the piece of `W_UK_T` `[H, D, R]` or `W_UV` `[H, R, D]`, with H heads of size D and a latent of size R.

    If kv_b_proj is unquantized, vLLM's tensor may be a view of kv_b_proj's memory, in which the last dim is not
    contiguous. Then the piece is transposed, because a checksum reads contiguous rows.
    """
    if attribute not in ("W_UK_T", "W_UV"):
        raise RuntimeError(f"vLLM derives {prefix}.{attribute} in a way that is not known. {REMEDY}.")
    tensor = getattr(attention, attribute)
    transposed = tensor.stride(-1) != 1

    def derived() -> Tensor:
        key_RHD, value_RHD = split_kv_b_proj(
            attention.kv_b_proj,
            out_dtype=tensor.dtype,
            kv_lora_rank=attention.kv_lora_rank,
            num_heads=attention.num_heads,
            qk_nope_head_dim=attention.qk_nope_head_dim,
            v_head_dim=attention.v_head_dim,
        )
        part = key_RHD.permute(1, 2, 0) if attribute == "W_UK_T" else value_RHD.transpose(0, 1)
        return part.mT if transposed else part

    return Piece(f"{prefix}.{attribute}", attention, attribute, tensor.dtype, transposed=transposed, derived=derived)


def shards(model: nn.Module, prefix: str, module: nn.Module, linears: Collection[str]) -> Iterator[Shard]:
    """Yield the shards that `module` holds on this rank, one for each layer of the policy in it.

    `linears` are the policy's linears, by their names in the engine.
    """
    if isinstance(module, linear.RowParallelLinear):
        columns = module.input_size_per_partition
        yield prefix, None, Span(module.tp_rank * columns, columns, module.input_size), 0
    elif isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        yield prefix, Span(indices.org_vocab_start_index, indices.num_org_elements, module.org_vocab_size), None, 0
    elif isinstance(module, MiniMaxText01RMSNormTP):
        rows = len(module.weight)
        yield prefix, Span(module.weight_shard_rank * rows, rows, module.weight_shard_world * rows), None, 0
    elif isinstance(module, GatedDeltaNetAttention):
        heads = module.num_v_heads // module.tp_size
        yield prefix, Span(module.tp_rank * heads, heads, module.num_v_heads), None, 0
    elif isinstance(module, linear.ColumnParallelLinear):
        yield from _column_shards(model, prefix, module, linears)
    else:
        yield prefix, None, None, 0


def _column_shards(
    model: nn.Module, prefix: str, module: linear.ColumnParallelLinear, linears: Collection[str]
) -> Iterator[Shard]:
    """Yield the shards of a module whose rows are divided over the ranks: one linear, or several that vLLM fuses."""
    parent, _, leaf = prefix.rpartition(".")
    parent_module = model.get_submodule(parent)
    rank, ranks = module.tp_rank, module.tp_size

    # 1. For each part that vLLM fuses here, find its number of rows on this rank (`sizes`) and the place of these rows
    #    in the policy's weight (`spans`). `names` are the policy's layers, each of one part or several (`PARTS`)
    is_one_layer = prefix in linears  # whether all parts together are one linear in the policy, too
    if isinstance(module, linear.QKVParallelLinear):
        names = FUSED["qkv_proj"]
        sizes = module.output_partition_sizes
        copies = module.num_kv_head_replicas  # ranks that hold the same KV heads
        q_spans = _dealt(sizes[:1], rank, ranks)
        kv_spans = _dealt(sizes[1:], rank // copies, ranks // copies)
        spans = q_spans + kv_spans
    elif isinstance(module, linear.MergedColumnParallelLinear):
        names = getattr(model, "packed_modules_mapping", FUSED).get(leaf, ())  # StableLM's class has no mapping
        sizes = module.output_partition_sizes
        spans = _dealt(sizes, rank, ranks)
    elif isinstance(parent_module, GatedDeltaNetAttention):  # `module` is its convolution of q, k and v
        names = [leaf]
        wholes = parent_module.key_dim, parent_module.key_dim, parent_module.value_dim
        sizes = [size // parent_module.tp_size for size in wholes]
        spans = _dealt(sizes, rank, ranks)
        is_one_layer = True
    else:
        names = [leaf]
        sizes = [module.output_size_per_partition]
        spans = _dealt(sizes, rank, ranks)

    # 2. Yield the layers, which follow each other in the engine's parameter
    if is_one_layer:
        yield prefix, _joined(spans), None, 0
        return
    if sum(PARTS.get(name, 1) for name in names) != len(sizes):
        raise RuntimeError(
            f"vLLM's {type(model).__name__} fuses {prefix} from {len(sizes)} parts, its packed_modules_mapping "
            f"names {list(names)}: what is sent cannot be compared with what is held. {REMEDY}."
        )
    offset = 0  # the layer's first row in the engine's parameter
    first = 0  # number of the layer's first part
    for name in names:
        end = first + PARTS.get(name, 1)
        rows = _joined(spans[first:end])
        yield f"{parent}.{name}", rows, None, offset
        offset += rows.size
        first = end


def _dealt(sizes: list[int], rank: int, ranks: int) -> list[Span]:
    """Return the span of `rank` in each part. `sizes` are the rows that each of the `ranks` ranks has of a part."""
    return [Span(rank * size, size, ranks * size) for size in sizes]


def _joined(spans: list[Span]) -> Span | Joined:
    return Joined(tuple(spans)) if len(spans) > 1 else spans[0]
