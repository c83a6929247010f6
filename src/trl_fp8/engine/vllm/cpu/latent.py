"""MLA (multi-head latent attention) of a CPU engine, in FP64: a token gets the same bits in every batch.

It reads vLLM's paged cache. vLLM has two ways to compute MLA. In a prefill it expands latents to keys and values by
the weight of kv_b_proj. In a decode it multiplies queries by one part of that weight, W_UK, and outputs by the other
part, W_UV. Here every token is computed as in a decode. A sync derives both parts from kv_b_proj. The cache holds
`cached`, which is the latent of each token followed by the rotated part of its key:

    write:  bytes = e4m3(cached / k_scale), round to nearest even, saturating     (a BF16 cache holds `cached` itself)
    read:   cached = bytes * k_scale
            scores = scale * (q W_UK, q rotated) cached^T
            output = softmax(scores) latent W_UV                                   in FP64; q and output are BF16

Shape letters: T tokens, H heads, N channels of a head without rotation, P rotated channels, L channels of a latent,
V channels of a head's value, C = L + P channels of a cached token, B blocks, R requests, Q queries of a request, S
cached tokens of a request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from trl_fp8.quantization.codec.e4m3 import cache_codes

from .reference_attention import ReferenceMetadataBuilder, attend, gather, padded, visible


class ReferenceLatentAttention(CPUMLABackend):
    """vLLM's CPU MLA backend with its cache layout, and `ReferenceLatentImpl` as its attention."""

    get_supported_head_sizes = staticmethod(list)  # an empty list means any head size
    supported_kv_cache_dtypes = ["fp8", "fp8_e4m3", "auto", "bfloat16"]
    get_impl_cls = staticmethod(lambda: ReferenceLatentImpl)
    get_builder_cls = staticmethod(lambda: LatentMetadataBuilder)


@dataclass(frozen=True)
class LatentMetadata:
    """vLLM's common metadata of a forward. All requests count as prefills, so vLLM passes their tokens to
    one call of `forward_mha`.
    """

    common: CommonAttentionMetadata
    num_decodes: int = 0
    num_decode_tokens: int = 0

    @property
    def num_actual_tokens(self) -> int:
        return self.common.num_actual_tokens

    @property
    def num_prefills(self) -> int:
        return self.common.num_reqs


class LatentMetadataBuilder(ReferenceMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> LatentMetadata:
        return LatentMetadata(common_attn_metadata)


class ReferenceLatentImpl(CPUMLAImpl):
    """Attention that computes all tokens in `forward_mha`.

    It multiplies by W_UK and W_UV itself, in FP64, because the bits of vLLM's BF16 products depend on the batch.
    """

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale
    ) -> None:
        """Write latents `[T, L]` and rotated keys `[T, 1, P]` to the cache slots in `slot_mapping` `[T]`.

        Tokens with slot -1 are padding and are not written.
        """
        if not kv_cache.numel():
            return
        is_token = slot_mapping >= 0
        # `slot_mapping` may be shorter than the inputs, whose further rows are padding, too
        cached_TC = torch.cat([kv_c_normed, k_pe.squeeze(1)], -1)[: len(slot_mapping)][is_token]
        cache = _as_bytes(kv_cache)
        if cache.dtype == torch.uint8:
            cached_TC = cache_codes(cached_TC, k_scale).view(torch.uint8)
        cache.view(-1, cache.shape[-1])[slot_mapping[is_token]] = cached_TC

    def forward_mha(
        self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None
    ) -> None:
        """Compute the attention of queries `q` `[T, H, N + P]` over the cache `[B, tokens per block, C]`.

        The cache already holds the tokens of this step. Writes the result to `output` `[T, H * V]`.
        """
        common, layer = attn_metadata.common, self._layer()

        # Transform queries to the space of cached tokens. Pad each request to Q, the most queries that a request has
        query_lens = common.query_start_loc.diff()
        is_query_RQ = torch.arange(int(query_lens.max())) < query_lens[:, None]
        plain_THN, rotated_THP = q.double().split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        absorbed_THL = torch.einsum("thn,hnl->thl", plain_THN, layer.W_UK_T.double())
        q_RQHC = padded(torch.cat([absorbed_THL, rotated_THP], -1), is_query_RQ)

        # All heads read the same cached tokens. A token's key is all its C channels, its value only the first L, the
        # latent. `attend` gets all C as values, too, and the other P channels of its result are dropped
        cached_R1SC = gather(
            _as_bytes(kv_c_and_k_pe_cache)[:, None], common.block_table_tensor, common.max_seq_len, k_scale
        )
        visible_RQS = visible(query_lens, common.seq_lens, common.max_seq_len, window=None)
        mixed_RQHC, _ = attend(q_RQHC, cached_R1SC, cached_R1SC, visible_RQS, self.scale)
        mixed_THL = mixed_RQHC[is_query_RQ][..., : self.kv_lora_rank]
        output_THV = torch.einsum("thl,hlv->thv", mixed_THL, layer.W_UV.double())
        output.copy_(output_THV.reshape(output.shape))

    def _layer(self) -> nn.Module:
        """Return the layer that this object belongs to. vLLM passes it to `forward_mqa`, but not to `forward_mha`."""
        layers = get_forward_context().no_compile_layers.values()
        return next(layer for layer in layers if getattr(layer, "impl", None) is self)


def _as_bytes(cache: Tensor) -> Tensor:
    """Return a view of an FP8 cache as uint8, and any other cache unchanged.

    vLLM allocates an FP8 cache as uint8, but passes `forward_mha` a view of it as e4m3.
    """
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
