"""FP8 KV cache attention for vLLM on any CPU, out of plain torch operations.

vLLM's own CPU kernel for an FP8 KV cache needs AVX-512 and rounds toward zero where the CUDA kernels round to nearest.
The reference keeps real e4m3 bytes in vLLM's paged cache and computes what the CUDA kernels compute, in FP64, so that
a decode step gives what a prefill of the same tokens gives, on any host:

    write:  bytes = e4m3(k / k_scale), round to nearest even, saturating          (same for v)
    read:   k = bytes * k_scale; softmax(q k^T) v in fp64; q and the output in the model's dtype

Layers that keep their cache in BF16 (`kv_cache_skip_layers`) go through the same code without the round trip.

Shape letters: T tokens, R requests, Q query length, S cached length, H heads, G kv heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from trl_fp8.quantization.e4m3 import E4M3, cache_codes


@contextmanager
def reference_attention() -> Iterator[None]:
    """Engines started inside the block use the reference backend (vLLM's public override of a backend)."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ReferenceFp8Attention.__qualname__}")
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()


class ReferenceFp8Attention(CPUAttentionBackend):
    """Cache layout and limits of vLLM's CPU backend, another implementation."""

    supported_kv_cache_dtypes = ["fp8", "fp8_e4m3", "auto", "bfloat16"]
    get_impl_cls = staticmethod(lambda: ReferenceFp8AttentionImpl)
    get_builder_cls = staticmethod(lambda: ReferenceFp8MetadataBuilder)


class ReferenceFp8MetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """vLLM's common metadata says all that the reference needs."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> CommonAttentionMetadata:
        return common_attn_metadata


class ReferenceFp8AttentionImpl(AttentionImpl):
    """Decoder self-attention over an e4m3 cache; grouped heads and sliding windows, nothing more exotic."""

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
            "logits soft-capping": bool(logits_soft_cap),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            "attention sinks": sinks is not None,
            f"KV cache type {kv_cache_dtype}": kv_cache_dtype not in ReferenceFp8Attention.supported_kv_cache_dtypes,
        }
        if names := [name for name, used in unsupported.items() if used]:
            raise NotImplementedError(
                f"kv_cache_dtype='fp8' on CPU: the reference attention does not support {', '.join(names)}, which "
                "this model uses. Set kv_cache_dtype='auto' on CPU, or run on a GPU."
            )
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.sliding_window, self.kv_cache_dtype = float(scale), sliding_window, kv_cache_dtype

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write k and v `[T, G, D]` as e4m3 bytes to the slots of `slot_mapping` `[T]` (-1: padding, not written)."""
        keys, values = _split_cache(kv_cache)
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
        query_lens = starts[1:] - starts[:-1]
        position_in_request = torch.arange(int(query_lens.max()))
        is_query_RQ = position_in_request < query_lens[:, None]
        q_RQHD = query.new_zeros(*is_query_RQ.shape, self.num_heads, self.head_size, dtype=torch.float64)
        q_RQHD[is_query_RQ] = query[:tokens].view(tokens, self.num_heads, self.head_size).double()
        table = attn_metadata.block_table_tensor
        k_RGSD, v_RGSD = (_gather(half, table, length) for half in _split_cache(kv_cache))
        if kv_cache.dtype == torch.uint8:
            k_RGSD, v_RGSD = k_RGSD * layer._k_scale_float, v_RGSD * layer._v_scale_float
        key_position = torch.arange(length)
        query_position_RQ1 = ((seq_lens - query_lens)[:, None] + position_in_request)[..., None]
        visible_RQS = key_position < seq_lens[:, None, None]
        if attn_metadata.causal:
            visible_RQS = visible_RQS & (key_position <= query_position_RQ1)
        if self.sliding_window is not None:
            visible_RQS = visible_RQS & (key_position > query_position_RQ1 - self.sliding_window)
        q, k, v = q_RQHD.transpose(1, 2), k_RGSD.double(), v_RGSD.double()
        attended = F.scaled_dot_product_attention(q, k, v, visible_RQS[:, None], scale=self.scale, enable_gqa=True)
        output[:tokens] = attended.transpose(1, 2)[is_query_RQ].float().to(output.dtype).view(output[:tokens].shape)
        return output


def _gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Each request's cached tokens (e4m3: the codes) as fp32 `[R, G, S, D]`; beyond a request is its garbage."""
    blocks = cache[block_table[:, : -(-length // cache.shape[2])].long()]  # [R, n, G, block, D]
    gathered = blocks.transpose(1, 2).flatten(2, 3)[:, :, :length]
    values = gathered.view(E4M3) if cache.dtype == torch.uint8 else gathered
    return values.float().nan_to_num_(0)  # unused slots may hold anything; masking NaN gives NaN


def _split_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """`[blocks, G, block, 2 D]` -> keys and values `[blocks, G, block, D]`, as vLLM's CPU backend lays it out."""
    blocks, heads, block_size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2 * block_size, width // 2).chunk(2, dim=2)
