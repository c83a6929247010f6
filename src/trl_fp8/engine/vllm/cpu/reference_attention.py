"""Attention of a CPU engine over vLLM's paged cache, in plain torch operations: `attend` is all of its arithmetic.

vLLM's own CPU kernels give a token other bits in another batch, and the one for an FP8 cache needs AVX-512 and rounds
toward zero where the CUDA kernels round to nearest. Here sums and softmax are FP64 and rounded once, so that a decode
step gives what a prefill of the same tokens gives, and what `attend_packed` gives for whole sequences:

    write:  bytes = e4m3(k / k_scale), round to nearest even, saturating          (same for v; a BF16 cache: k itself)
    read:   k = bytes * k_scale; softmax(q k^T) v in fp64; q and the output in the model's dtype

A head with an attention sink s gives each query one more score, s, without a value: the softmax of the others
sums to less than 1.

Shape letters: T and N tokens, R requests, Q query length, S cached length, H heads, G kv heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from trl_fp8.quantization.codec.e4m3 import cache_codes, e4m3_values


SCORES_BYTES = 64 * 2**20  # of FP64 attention scores at a time
READ_BYTES = 2 * 2**20  # of FP64 keys and values at a time; more of them do not fit a core's L2 cache


@contextmanager
def overridden(backend: AttentionBackendEnum, cls: type[AttentionBackend]) -> Iterator[None]:
    """Let engines that start inside the block use `cls` for a backend (vLLM's public override)."""
    register_backend(backend, f"{cls.__module__}.{cls.__qualname__}")
    try:
        yield
    finally:
        backend.clear_override()


class ReferenceAttention(CPUAttentionBackend):
    """Cache layout and limits of vLLM's CPU backend, another implementation."""

    # any head size: there is no kernel to be compiled for it
    get_supported_head_sizes = staticmethod(list)
    supports_sink = staticmethod(lambda: True)
    supported_kv_cache_dtypes = ["fp8", "fp8_e4m3", "auto", "bfloat16"]
    get_impl_cls = staticmethod(lambda: ReferenceAttentionImpl)
    get_builder_cls = staticmethod(lambda: ReferenceMetadataBuilder)
    supports_mm_prefix = classmethod(lambda cls: True)


class ReferenceMetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """vLLM's common metadata says all that the reference needs."""

    def __init__(self, *args):  # vLLM's is abstract
        super().__init__(*args)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> CommonAttentionMetadata:
        return common_attn_metadata


class ReferenceAttentionImpl(AttentionImpl):
    """Decoder self-attention: grouped heads, sliding windows, soft-capped logits, sinks; nothing more exotic."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "fp8",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        unsupported = {
            "ALiBi": alibi_slopes is not None,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            f"KV cache type {kv_cache_dtype}": kv_cache_dtype not in ReferenceAttention.supported_kv_cache_dtypes,
        }
        if names := [name for name, used in unsupported.items() if used]:
            raise NotImplementedError(
                f"the CPU engine's attention does not support {', '.join(names)}, which this model uses. Run on a GPU."
            )
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.sliding_window, self.kv_cache_dtype = float(scale), sliding_window, kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None  # vLLM's models without one may say 0
        self.sinks = sinks

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write k and v `[T, G, D]`, as bytes to an FP8 cache, to the slots of `slot_mapping` `[T]` (-1: padding)."""
        keys, values = keys_and_values(kv_cache).unbind(2)
        real = slot_mapping >= 0
        slots = slot_mapping[real]
        block, offset = slots // keys.shape[2], slots % keys.shape[2]
        # scales are read from the host floats, as vLLM's CPU backend does
        for cache, states, scale in (keys, key, layer._k_scale_float), (values, value, layer._v_scale_float):
            written = states[: len(slot_mapping)][real]
            if cache.dtype == torch.uint8:
                written = cache_codes(written, scale).view(torch.uint8)
            cache[block, :, offset] = written

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> Tensor:
        """Attend `query` `[T, H, D]` over the cache, which holds this step's k and v already; fills `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("the reference attention does not quantize its output.")
        if attn_metadata is None:  # vLLM's profiling run
            return output
        tokens, length = attn_metadata.num_actual_tokens, attn_metadata.max_seq_len
        starts, seq_lens = attn_metadata.query_start_loc, attn_metadata.seq_lens
        query_lens = starts.diff()
        is_query_RQ = torch.arange(int(query_lens.max())) < query_lens[:, None]
        q_RQHD = padded(query[:tokens].view(tokens, self.num_heads, self.head_size), is_query_RQ)
        output_RQHD = torch.empty_like(q_RQHD, dtype=output.dtype)
        cache = keys_and_values(kv_cache)
        visible_RQS = visible(query_lens, seq_lens, length, self.sliding_window, attn_metadata.causal)
        for request, images in (attn_metadata.mm_req_doc_ranges or {}).items():
            _see_whole(images, visible_RQS[request], int(seq_lens[request] - query_lens[request]))
        scales_211 = torch.tensor([layer._k_scale_float, layer._v_scale_float])[:, None, None]
        at_a_time = max(1, READ_BYTES // (16 * self.num_kv_heads * length * self.head_size))
        tensors = q_RQHD, attn_metadata.block_table_tensor, visible_RQS, output_RQHD
        for q, table, seen, out in zip(*(tensor.split(at_a_time) for tensor in tensors), strict=True):
            k, v = gather(cache, table, length, scales_211).double().unbind(2)
            out.copy_(attend(q, k, v, seen, self.scale, self.logits_soft_cap, self.sinks)[0].float())
        output[:tokens] = output_RQHD[is_query_RQ].view(output[:tokens].shape)
        return output


def attend(
    q_RQHD: Tensor,
    k_RGSD: Tensor,
    v_RGSD: Tensor,
    visible_RQS: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention output of each query over its `visible` keys, `[R, Q, H, D]`, and the log of its softmax's
    denominator, `[R, H, Q]`, both FP64 and not finite where it sees none. Keys and values have to be finite.
    """
    k, v, groups = k_RGSD.double(), v_RGSD.double(), k_RGSD.shape[1]
    queries = max(1, SCORES_BYTES // (8 * q_RQHD.shape[0] * q_RQHD.shape[2] * k.shape[2]))
    out, lse = [], []
    for q, seen_RqS in zip(q_RQHD.split(queries, 1), visible_RQS.split(queries, 1), strict=True):
        # the heads of a group read the same keys, as if they were more queries
        q_RGhqD = q.double().unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
        sizes = q_RGhqD.shape
        if softcap is None:  # torch's kernel has none
            hidden_RqS = torch.zeros((), dtype=torch.float64).where(seen_RqS, -torch.inf)
            hidden_R1nS = hidden_RqS[:, None, None].expand(-1, -1, sizes[2], -1, -1).flatten(2, 3)
            read_RGnD, lse_RGn = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_RGhqD.flatten(2, 3), k, v, attn_mask=hidden_R1nS.expand(-1, groups, -1, -1), scale=scaling
            )
        else:
            scores = (q_RGhqD.flatten(2, 3) @ k.mT).view(*sizes[:4], -1) * scaling
            scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill_(~seen_RqS[:, None, None], -torch.inf).flatten(2, 3)
            lse_RGn = scores.logsumexp(-1)
            read_RGnD = scores.sub_(lse_RGn[..., None]).exp_() @ v
        out.append(read_RGnD.unflatten(2, sizes[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3))
        lse.append(lse_RGn.unflatten(2, sizes[2:4]).flatten(1, 2))
    out_RQHD, lse_RHQ = torch.cat(out, 1), torch.cat(lse, 2)
    if sinks_H is None:
        return out_RQHD, lse_RHQ
    whole_RHQ = torch.logaddexp(lse_RHQ, sinks_H.detach().double()[:, None])
    return out_RQHD * (lse_RHQ - whole_RHQ).exp().transpose(1, 2)[..., None], whole_RHQ


def attend_packed(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    starts: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the engine's causal attention of whole sequences, one after the other, bit for bit: `[N, H, D]` in q's
    dtype, and the log of the softmax's denominators `[H, N]` in FP64.

    k and v are as they are read from the cache; `starts` `[sequences + 1]` says where each begins, and the number of
    tokens; `window` is in tokens, itself included; `sinks_H` are a score for each head, without a value.
    """
    if not len(q_NHD):
        return torch.empty_like(q_NHD), q_NHD.new_empty(q_NHD.shape[1::-1], dtype=torch.float64)
    lengths = starts.diff()
    real_RQ = torch.arange(int(lengths.max())) < lengths[:, None]
    k_RGSD, v_RGSD = (padded(states, real_RQ).transpose(1, 2) for states in (k_NGD, v_NGD))
    visible_RQS = visible(lengths, lengths, real_RQ.shape[1], window)
    out, lse_RHQ = attend(padded(q_NHD, real_RQ), k_RGSD, v_RGSD, visible_RQS, scaling, softcap, sinks_H)
    return out[real_RQ].float().to(q_NHD.dtype), lse_RHQ.transpose(1, 2)[real_RQ].T


def visible(query_lens: Tensor, seq_lens: Tensor, length: int, window: int | None, causal: bool = True) -> Tensor:
    """Return which of `length` keys the last `query_lens` tokens of sequences of `seq_lens` see, `[R, Q, S]`."""
    key = torch.arange(length)
    query_RQ1 = ((seq_lens - query_lens)[:, None] + torch.arange(int(query_lens.max())))[..., None]
    seen = key < seq_lens[:, None, None]
    if causal:
        seen = seen & (key <= query_RQ1)
    return seen if window is None else seen & (key > query_RQ1 - window)


def _see_whole(images: list[tuple[int, int]], visible_QS: Tensor, first: int) -> None:
    """Let tokens of `images` (first and last position of each) see all of theirs; queries start at `first`."""
    for start, end in images:
        visible_QS[max(start - first, 0) : max(end + 1 - first, 0), start : end + 1] = True


def padded(packed: Tensor, real_RQ: Tensor) -> Tensor:
    """Return `[N, ...]` as `[R, Q, ...]`, zero where `real_RQ` is false."""
    rows = packed.new_zeros(*real_RQ.shape, *packed.shape[1:])
    rows[real_RQ] = packed
    return rows


def gather(cache: Tensor, block_table: Tensor, length: int, scale: Tensor | float) -> Tensor:
    """Return each request's cached tokens, `[R, ..., S, D]` of `[blocks, ..., block, D]`; codes times `scale` in FP32.

    Beyond the end of a request is garbage, but no NaN, which masking would not remove.
    """
    table = block_table[:, : -(-length // cache.shape[-2])]
    blocks = cache.index_select(0, table.flatten()).unflatten(0, table.shape)
    gathered = blocks.movedim(1, -3).flatten(-3, -2)[..., :length, :]
    return e4m3_values(gathered, scale, nan=False) if cache.dtype == torch.uint8 else gathered.nan_to_num_(0)


def keys_and_values(kv_cache: Tensor) -> Tensor:
    """Return `[blocks, G, block, 2 D]` as `[blocks, G, 2, block, D]`, as vLLM's CPU backend lays it out."""
    blocks, heads, block_size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2, block_size, width // 2)
