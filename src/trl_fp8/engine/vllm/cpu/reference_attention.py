"""Attention of a CPU engine over vLLM's paged cache, in plain torch operations.

vLLM calls two methods of `ReferenceAttentionImpl` for each layer, and a trainer calls `attend_packed`:

    do_kv_cache_update  writes to the cache: codes = e4m3(k / k_scale), rounded to nearest even, saturating; the same
                        for v. A BF16 cache stores k and v themselves
    forward             reads the cache (`gather`): k = codes * k_scale, the same for v; then calls `attend`
    attend_packed       calls `attend` for complete sequences without a cache
    attend              softmax(q k^T) v in FP64. q and the rounded output have the model's dtype

With vLLM's own CPU kernels a token's bits depend on the rest of the batch. Their kernel for an FP8 cache also needs
AVX-512, and rounds toward zero, whereas the CUDA kernels round to nearest. Here sums and softmax are FP64, and the
result is rounded once. Sums in another order differ in FP64, but practically never after the rounding. So decode
steps, a prefill of the same tokens, and `attend_packed` of the same sequences give the same bits.

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
        names = [name for name, is_used in unsupported.items() if is_used]
        if names:
            raise NotImplementedError(
                f"the CPU engine's attention does not support {', '.join(names)}, which this model uses. Run on a GPU."
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None  # models without a soft cap may pass 0
        self.sinks = sinks

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write k and v `[T, G, D]` to the cache slots in `slot_mapping` `[T]`, as codes if the cache is FP8.

        Tokens with slot -1 are padding and are not written.
        """
        cached_keys, cached_values = keys_and_values(kv_cache).unbind(2)
        block_size = cached_keys.shape[2]
        is_token = slot_mapping >= 0
        slots = slot_mapping[is_token]
        block, offset = slots // block_size, slots % block_size
        # The scales are the layer's Python floats, which vLLM's CPU backend reads, too
        for cache, states, scale in (
            (cached_keys, key, layer._k_scale_float),
            (cached_values, value, layer._v_scale_float),
        ):
            written = states[: len(slot_mapping)][is_token]  # rows after those of `slot_mapping` are padding, too
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
        tokens = attn_metadata.num_actual_tokens
        length = attn_metadata.max_seq_len  # S
        seq_lens = attn_metadata.seq_lens
        query_lens = attn_metadata.query_start_loc.diff()

        # 1. Pad each request to Q queries
        is_query_RQ = torch.arange(int(query_lens.max())) < query_lens[:, None]
        q_RQHD = padded(query[:tokens].view(tokens, self.num_heads, self.head_size), is_query_RQ)

        # 2. Find which keys each query sees
        visible_RQS = visible(query_lens, seq_lens, length, self.sliding_window, attn_metadata.causal)
        for request, images in (attn_metadata.mm_req_doc_ranges or {}).items():
            first_query = int(seq_lens[request] - query_lens[request])
            _unmask_images(images, visible_RQS[request], first_query)

        # 3. Read the cache and attend, for as many requests at a time as `READ_BYTES` allows
        cache = keys_and_values(kv_cache)
        scales_211 = torch.tensor([layer._k_scale_float, layer._v_scale_float])[:, None, None]  # of k, of v
        request_bytes = 16 * self.num_kv_heads * length * self.head_size  # 16: FP64 elements of k and of v
        requests = max(1, READ_BYTES // request_bytes)
        output_RQHD = torch.empty_like(q_RQHD, dtype=output.dtype)
        for q, block_table, seen, out in zip(
            q_RQHD.split(requests),
            attn_metadata.block_table_tensor.split(requests),
            visible_RQS.split(requests),
            output_RQHD.split(requests),
            strict=True,
        ):
            k, v = gather(cache, block_table, length, scales_211).double().unbind(2)
            read, _ = attend(q, k, v, seen, scaling=self.scale, softcap=self.logits_soft_cap, sinks_H=self.sinks)
            out.copy_(read)

        # 4. Remove the padding
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

    Keys and values must be finite, also keys and values that no query sees.

    Args:
        visible_RQS: Whether a query sees a key.
        softcap: Scores s become softcap * tanh(s / softcap). None: no cap.
        sinks_H: The score of each head's sink.

    Returns:
        The output `[R, Q, H, D]` and the log of the softmax's denominator `[R, H, Q]`, both in FP64. They are not
        finite for a query that sees no key.
    """
    k, v = k_RGSD.double(), v_RGSD.double()
    requests, _, heads, _ = q_RQHD.shape
    query_bytes = 8 * requests * heads * k.shape[2]  # of the scores of one query in each request
    queries = max(1, SCORES_BYTES // query_bytes)
    outputs, lses = [], []
    for q_RqHD, seen_RqS in zip(q_RQHD.split(queries, 1), visible_RQS.split(queries, 1), strict=True):
        output_RqHD, lse_RHq = _attend_at_once(q_RqHD.double(), k, v, seen_RqS, scaling=scaling, softcap=softcap)
        outputs.append(output_RqHD)
        lses.append(lse_RHq)
    out_RQHD = torch.cat(outputs, 1)
    lse_RHQ = torch.cat(lses, 2)
    if sinks_H is None:
        return out_RQHD, lse_RHQ
    # The sink adds exp(s) to the softmax's denominator, so all weights of actual values become smaller
    with_sink_RHQ = torch.logaddexp(lse_RHQ, sinks_H.detach().double()[:, None])
    factor_RQH = (lse_RHQ - with_sink_RHQ).exp().transpose(1, 2)
    return out_RQHD * factor_RQH[..., None], with_sink_RHQ


def _attend_at_once(
    q_RqHD: Tensor, k_RGSD: Tensor, v_RGSD: Tensor, seen_RqS: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return what `attend` returns without sinks. All tensors are FP64, and all scores exist at once."""
    # Heads that share a kv head read the same keys, so treat them as further queries of one head: n = h q
    groups = k_RGSD.shape[1]
    q_RGhqD = q_RqHD.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    q_RGnD = q_RGhqD.flatten(2, 3)
    h_and_q = q_RGhqD.shape[2:4]
    if softcap is None:
        # The mask is added to the scores, and repeated for each of the h heads
        mask_RqS = torch.zeros((), dtype=torch.float64).where(seen_RqS, -torch.inf)
        mask_R1hqS = mask_RqS[:, None, None].expand(-1, -1, h_and_q[0], -1, -1)
        mask_RGnS = mask_R1hqS.flatten(2, 3).expand(-1, groups, -1, -1)
        output_RGnD, lse_RGn = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_RGnD, k_RGSD, v_RGSD, attn_mask=mask_RGnS, scale=scaling
        )
    else:  # torch's kernel has no soft cap
        scores_RGhqS = (q_RGnD @ k_RGSD.mT).unflatten(2, h_and_q) * scaling
        scores_RGhqS = softcap * torch.tanh(scores_RGhqS / softcap)
        scores_RGnS = scores_RGhqS.masked_fill_(~seen_RqS[:, None, None], -torch.inf).flatten(2, 3)
        lse_RGn = scores_RGnS.logsumexp(-1)
        weights_RGnS = scores_RGnS.sub_(lse_RGn[..., None]).exp_()
        output_RGnD = weights_RGnS @ v_RGSD
    output_RqHD = output_RGnD.unflatten(2, h_and_q).permute(0, 3, 1, 2, 4).flatten(2, 3)
    lse_RHq = lse_RGn.unflatten(2, h_and_q).flatten(1, 2)
    return output_RqHD, lse_RHq


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
        k_NGD, v_NGD: Keys and values as an engine reads them from its cache, which has rounded them.
        starts: `[sequences + 1]`. The index of each sequence's first token, and N at the end.
        window: The number of tokens that a query sees, itself included; None: no limit.
        softcap, sinks_H: See `attend`.

    Returns:
        The output `[N, H, D]` in q's dtype, and the log of the softmax's denominator `[H, N]` in FP64.
    """
    tokens, heads, _ = q_NHD.shape
    if not tokens:
        return torch.empty_like(q_NHD), q_NHD.new_empty(heads, tokens, dtype=torch.float64)
    lengths = starts.diff()
    longest = int(lengths.max())
    is_token_RQ = torch.arange(longest) < lengths[:, None]
    q_RQHD = padded(q_NHD, is_token_RQ)
    k_RGSD = padded(k_NGD, is_token_RQ).transpose(1, 2)
    v_RGSD = padded(v_NGD, is_token_RQ).transpose(1, 2)
    visible_RQS = visible(query_lens=lengths, seq_lens=lengths, length=longest, window=window)
    out_RQHD, lse_RHQ = attend(q_RQHD, k_RGSD, v_RGSD, visible_RQS, scaling=scaling, softcap=softcap, sinks_H=sinks_H)
    return out_RQHD[is_token_RQ].to(q_NHD.dtype), lse_RHQ.transpose(1, 2)[is_token_RQ].T


def visible(query_lens: Tensor, seq_lens: Tensor, length: int, window: int | None, causal: bool = True) -> Tensor:
    """Return which keys each query sees, `[R, Q, S]`, bool.

    Args:
        query_lens: `[R]`. The number of queries of each request, which are the last tokens of its sequence.
        seq_lens: `[R]`. The number of tokens of each sequence.
        length: S, the number of keys in the result.
        window: The number of tokens that a query sees, itself included; None: no limit.
        causal: Whether a query sees no later keys.
    """
    # Positions of keys and queries in their sequence
    key_S = torch.arange(length)
    first_query_R = seq_lens - query_lens
    query_RQ = first_query_R[:, None] + torch.arange(int(query_lens.max()))
    query_RQ1 = query_RQ[..., None]
    seen_RQS = (key_S < seq_lens[:, None, None]) & torch.ones_like(query_RQ1, dtype=torch.bool)
    if causal:
        seen_RQS = seen_RQS & (key_S <= query_RQ1)
    if window is not None:
        seen_RQS = seen_RQS & (key_S > query_RQ1 - window)
    return seen_RQS


def _unmask_images(images: list[tuple[int, int]], visible_QS: Tensor, first: int) -> None:
    """Let each token of an image see all tokens of the same image. Changes `visible_QS`.

    `images` has the first and last position of each image, and `first` is the position of the first query.
    """
    for start, end in images:
        queries = slice(max(start - first, 0), max(end + 1 - first, 0))  # tokens before `first` are no queries
        visible_QS[queries, start : end + 1] = True


def padded(packed: Tensor, is_token_RQ: Tensor) -> Tensor:
    """Return the packed tokens `[N, ...]` as padded rows `[R, Q, ...]`, zero where `is_token_RQ` is false."""
    rows = packed.new_zeros(*is_token_RQ.shape, *packed.shape[1:])
    rows[is_token_RQ] = packed
    return rows


def gather(cache: Tensor, block_table: Tensor, length: int, scale: Tensor | float) -> Tensor:
    """Return the first `length` cached tokens of each request, `[R, ..., S, D]`: FP8 codes times `scale`, in FP32, or
    the values of a BF16 cache.

    `cache` is `[blocks, ..., block size, D]`. `block_table` `[R, blocks of a request]` has indices of blocks in it.
    Beyond the end of a request the result is arbitrary, but without NaN: NaN times a weight of zero would stay NaN.
    """
    block_size = cache.shape[-2]
    table = block_table[:, : -(-length // block_size)]  # -(-a // b) rounds up
    blocks = cache.index_select(0, table.flatten()).unflatten(0, table.shape)  # [R, blocks, ..., block size, D]
    gathered = blocks.movedim(1, -3).flatten(-3, -2)[..., :length, :]
    if cache.dtype == torch.uint8:
        return e4m3_values(gathered, scale, nan=False)
    return gathered.nan_to_num_(0)


def keys_and_values(kv_cache: Tensor) -> Tensor:
    """Return a view `[blocks, G, 2, block size, D]` of a cache `[blocks, G, block size, 2 D]`; dim 2 has k, then v.

    vLLM's CPU backend uses the memory of a block in this way.
    """
    blocks, heads, block_size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2, block_size, width // 2)
