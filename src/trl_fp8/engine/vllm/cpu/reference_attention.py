"""Attention of a CPU engine over vLLM's paged cache, in plain torch operations. All arithmetic is in `attend`.

With vLLM's own CPU kernels a token's bits depend on the rest of the batch. Their kernel for an FP8 cache also needs
AVX-512, and rounds toward zero, whereas the CUDA kernels round to nearest. Here sums and softmax are FP64, and the
result is rounded once. Sums in another order differ in FP64, but practically never after the rounding. So decode
steps, a prefill of the same tokens, and `attend_packed` of complete sequences give the same bits:

    write:  codes = e4m3(k / k_scale), rounded to nearest even, saturating; the same for v. A BF16 cache stores k and v
    read:   k = codes * k_scale; softmax(q k^T) v in FP64; q and the output have the model's dtype

A head with an attention sink s gives each query one more score, s, which has no value vector: the weights of the
actual values sum to less than 1.

Shape letters: T and N tokens, R requests, Q the most queries of any request, S the most cached tokens of any request,
H heads, G kv heads, D head size. Lower case: q queries computed at a time, h heads that share a kv head (H = G h),
n = h q.
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


SCORES_BYTES = 64 * 2**20  # size of the FP64 attention scores that are computed at a time
# Size of the FP64 keys and values that are read at a time; more would not fit into a core's L2 cache
READ_BYTES = 2 * 2**20


@contextmanager
def overridden(backend: AttentionBackendEnum, cls: type[AttentionBackend]) -> Iterator[None]:
    """Let engines that start inside the block use `cls` for vLLM's `backend` (by vLLM's public override)."""
    register_backend(backend, f"{cls.__module__}.{cls.__qualname__}")
    try:
        yield
    finally:
        backend.clear_override()


class ReferenceAttention(CPUAttentionBackend):
    """Backend of `ReferenceAttentionImpl`, with the cache layout and limits of vLLM's CPU backend."""

    get_supported_head_sizes = staticmethod(list)  # an empty list means any head size
    supports_sink = staticmethod(lambda: True)
    supported_kv_cache_dtypes = ["fp8", "fp8_e4m3", "auto", "bfloat16"]
    get_impl_cls = staticmethod(lambda: ReferenceAttentionImpl)
    get_builder_cls = staticmethod(lambda: ReferenceMetadataBuilder)
    supports_mm_prefix = classmethod(lambda cls: True)


class ReferenceMetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Metadata builder that returns vLLM's common metadata unchanged. The reference needs nothing else."""

    def __init__(self, *args):  # vLLM's `__init__` is abstract
        super().__init__(*args)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> CommonAttentionMetadata:
        return common_attn_metadata


class ReferenceAttentionImpl(AttentionImpl):
    """Decoder self-attention with grouped heads, sliding windows, soft-capped scores and sinks.

    Raises `NotImplementedError` for any other variant of attention.
    """

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
        self.logits_soft_cap = logits_soft_cap or None  # models without a soft cap may pass 0
        self.sinks = sinks

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write k and v `[T, G, D]` to the cache slots in `slot_mapping` `[T]`, as codes if the cache is FP8.

        Tokens with slot -1 are padding and are not written.
        """
        keys, values = keys_and_values(kv_cache).unbind(2)
        real = slot_mapping >= 0
        slots = slot_mapping[real]
        block, offset = slots // keys.shape[2], slots % keys.shape[2]
        # The scales are the layer's Python floats, which vLLM's CPU backend reads, too
        for cache, states, scale in (keys, key, layer._k_scale_float), (values, value, layer._v_scale_float):
            written = states[: len(slot_mapping)][real]
            if cache.dtype == torch.uint8:
                written = cache_codes(written, scale).view(torch.uint8)
            cache[block, :, offset] = written

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> Tensor:
        """Write the attention of `query` `[T, H, D]` into `output`. The cache holds this step's k and v already."""
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
            _unmask_images(images, visible_RQS[request], int(seq_lens[request] - query_lens[request]))
        # Shape [2, 1, 1]: one scale for k, one for v
        scales_211 = torch.tensor([layer._k_scale_float, layer._v_scale_float])[:, None, None]
        # 16 bytes: one FP64 element of k and one of v
        requests_at_a_time = max(1, READ_BYTES // (16 * self.num_kv_heads * length * self.head_size))
        tensors = q_RQHD, attn_metadata.block_table_tensor, visible_RQS, output_RQHD
        for q, table, seen, out in zip(*(tensor.split(requests_at_a_time) for tensor in tensors), strict=True):
            k, v = gather(cache, table, length, scales_211).double().unbind(2)
            out.copy_(attend(q, k, v, seen, self.scale, self.logits_soft_cap, self.sinks)[0])
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
    """Return each query's attention over its visible keys.

    Keys and values must be finite, also those that no query sees.

    Args:
        visible_RQS: Whether a query sees a key.
        softcap: Scores s become softcap * tanh(s / softcap). None: no cap.
        sinks_H: The score of each head's sink.

    Returns:
        The output `[R, Q, H, D]` and the log of the softmax's denominator `[R, H, Q]`, both in FP64. They are not
        finite for a query that sees no key.
    """
    k, v, groups = k_RGSD.double(), v_RGSD.double(), k_RGSD.shape[1]
    queries = max(1, SCORES_BYTES // (8 * q_RQHD.shape[0] * q_RQHD.shape[2] * k.shape[2]))
    out, lse = [], []
    for q, seen_RqS in zip(q_RQHD.split(queries, 1), visible_RQS.split(queries, 1), strict=True):
        # Heads that share a kv head read the same keys, so treat them as further queries of one head: [R, G, h q, D]
        q_RGhqD = q.double().unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
        sizes = q_RGhqD.shape
        if softcap is None:
            mask_RqS = torch.zeros((), dtype=torch.float64).where(seen_RqS, -torch.inf)
            # Added to the scores. Repeat it for each of the h heads: [R, q, S] -> [R, 1, h, q, S] -> [R, 1, h q, S]
            mask_R1nS = mask_RqS[:, None, None].expand(-1, -1, sizes[2], -1, -1).flatten(2, 3)
            read_RGnD, lse_RGn = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_RGhqD.flatten(2, 3), k, v, attn_mask=mask_R1nS.expand(-1, groups, -1, -1), scale=scaling
            )
        else:  # torch's kernel has no soft cap
            scores = (q_RGhqD.flatten(2, 3) @ k.mT).view(*sizes[:4], -1) * scaling
            scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill_(~seen_RqS[:, None, None], -torch.inf).flatten(2, 3)
            lse_RGn = scores.logsumexp(-1)
            read_RGnD = scores.sub_(lse_RGn[..., None]).exp_() @ v
        # [R, G, h q, D] -> [R, q, H, D]
        out.append(read_RGnD.unflatten(2, sizes[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3))
        # [R, G, h q] -> [R, H, q]
        lse.append(lse_RGn.unflatten(2, sizes[2:4]).flatten(1, 2))
    out_RQHD, lse_RHQ = torch.cat(out, 1), torch.cat(lse, 2)
    if sinks_H is None:
        return out_RQHD, lse_RHQ
    # The sink adds exp(s) to the softmax's denominator
    with_sink_RHQ = torch.logaddexp(lse_RHQ, sinks_H.detach().double()[:, None])
    return out_RQHD * (lse_RHQ - with_sink_RHQ).exp().transpose(1, 2)[..., None], with_sink_RHQ


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
    """Return the causal attention of complete sequences, packed one after another, with the engine's bits.

    Args:
        k_NGD, v_NGD: The keys and values that the cache returns, which it has rounded.
        starts: `[sequences + 1]`. The index of each sequence's first token, and N at the end.
        window: The number of tokens that a query sees, itself included; None: no limit.
        softcap, sinks_H: See `attend`.

    Returns:
        The output `[N, H, D]` in q's dtype, and the log of the softmax's denominator `[H, N]` in FP64.
    """
    if not len(q_NHD):
        return torch.empty_like(q_NHD), q_NHD.new_empty(q_NHD.shape[1::-1], dtype=torch.float64)
    lengths = starts.diff()
    real_RQ = torch.arange(int(lengths.max())) < lengths[:, None]
    k_RGSD, v_RGSD = (padded(states, real_RQ).transpose(1, 2) for states in (k_NGD, v_NGD))
    visible_RQS = visible(lengths, lengths, real_RQ.shape[1], window)
    out, lse_RHQ = attend(padded(q_NHD, real_RQ), k_RGSD, v_RGSD, visible_RQS, scaling, softcap, sinks_H)
    return out[real_RQ].to(q_NHD.dtype), lse_RHQ.transpose(1, 2)[real_RQ].T


def visible(query_lens: Tensor, seq_lens: Tensor, length: int, window: int | None, causal: bool = True) -> Tensor:
    """Return which keys each query sees, `[R, Q, S]`, bool.

    Args:
        query_lens: `[R]`. The number of queries of each request, which are the last tokens of its sequence.
        seq_lens: `[R]`. The number of tokens of each sequence.
        length: S, the number of keys in the result.
        window: The number of tokens that a query sees, itself included; None: no limit.
        causal: Whether a query sees no later keys.
    """
    key_S = torch.arange(length)  # positions in the sequence; the next line has those of the queries
    query_RQ1 = ((seq_lens - query_lens)[:, None] + torch.arange(int(query_lens.max())))[..., None]
    seen_RQS = key_S < seq_lens[:, None, None]
    if causal:
        seen_RQS = seen_RQS & (key_S <= query_RQ1)
    return seen_RQS if window is None else seen_RQS & (key_S > query_RQ1 - window)


def _unmask_images(images: list[tuple[int, int]], visible_QS: Tensor, first: int) -> None:
    """Let each token of an image see all tokens of the same image. Changes `visible_QS`.

    `images` has the first and last position of each image, and `first` is the position of the first query.
    """
    for start, end in images:
        visible_QS[max(start - first, 0) : max(end + 1 - first, 0), start : end + 1] = True


def padded(packed: Tensor, real_RQ: Tensor) -> Tensor:
    """Return the packed tokens `[N, ...]` as padded rows `[R, Q, ...]`, zero where `real_RQ` is false."""
    rows = packed.new_zeros(*real_RQ.shape, *packed.shape[1:])
    rows[real_RQ] = packed
    return rows


def gather(cache: Tensor, block_table: Tensor, length: int, scale: Tensor | float) -> Tensor:
    """Return the first `length` cached tokens of each request, `[R, ..., S, D]`: FP8 codes times `scale`, in FP32, or
    the values of a BF16 cache.

    `cache` is `[blocks, ..., block size, D]`, and `block_table` `[R, blocks of a request]` has indices of its blocks.
    Beyond the end of a request the result is arbitrary, but without NaN: NaN times a weight of zero would stay NaN.
    """
    table = block_table[:, : -(-length // cache.shape[-2])]  # -(-a // b) rounds up
    blocks = cache.index_select(0, table.flatten()).unflatten(0, table.shape)
    gathered = blocks.movedim(1, -3).flatten(-3, -2)[..., :length, :]
    return e4m3_values(gathered, scale, nan=False) if cache.dtype == torch.uint8 else gathered.nan_to_num_(0)


def keys_and_values(kv_cache: Tensor) -> Tensor:
    """Return a view `[blocks, G, 2, block size, D]` of a cache `[blocks, G, block size, 2 D]`; dim 2 has k, then v.

    vLLM's CPU backend uses the memory of a block in this way.
    """
    blocks, heads, block_size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2, block_size, width // 2)
