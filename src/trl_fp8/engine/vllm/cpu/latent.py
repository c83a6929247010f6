"""MLA on a CPU engine, over vLLM's paged cache of latents, in FP64: a token's bits are the same in every batch.

In a prefill vLLM expands latents by kv_b_proj. In a decode it multiplies queries and outputs by two parts of that
weight, W_UK and W_UV. Here every token is computed as in a decode, so that only these two parts are used. A sync
derives them from kv_b_proj.

    write:  bytes = e4m3(latent / k_scale), round to nearest even, saturating     (a BF16 cache stores the latent)
    read:   latent = bytes * k_scale; softmax((q W_UK) latent^T) latent W_UV in fp64; q and the output in BF16

Shape letters: T tokens, H heads, N their size without rotation, P the rotated rest, L latent size, B blocks.
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
    """Cache layout and limits of vLLM's CPU backend, another implementation."""

    get_supported_head_sizes = staticmethod(list)  # an empty list: any head size, as no kernel is compiled
    supported_kv_cache_dtypes = ["fp8", "fp8_e4m3", "auto", "bfloat16"]
    get_impl_cls = staticmethod(lambda: ReferenceLatentImpl)
    get_builder_cls = staticmethod(lambda: LatentMetadataBuilder)


@dataclass(frozen=True)
class LatentMetadata:
    """vLLM's common metadata with no decodes in it: vLLM then calls `forward_mha` for every token."""

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
    """Attention whose `forward_mha` computes every token. It multiplies by W_UK and W_UV itself, in FP64: the bits of
    vLLM's BF16 product depend on the batch.
    """

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale
    ) -> None:
        """Write latents `[T, L]` and rotated keys `[T, 1, P]` to the slots of `slot_mapping` `[T]` (-1: padding)."""
        if not kv_cache.numel():
            return
        real = slot_mapping >= 0
        latent = torch.cat([kv_c_normed, k_pe.squeeze(1)], -1)[: len(slot_mapping)][real]
        if kv_cache.dtype == torch.uint8:
            latent = cache_codes(latent, k_scale).view(torch.uint8)
        kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping[real]] = latent

    def forward_mha(
        self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None
    ) -> None:
        """Attend `q` `[T, H, N + P]` over the cache `[B, block, L + P]`, which holds this step's latents already.

        Fills `output` `[T, H * value size]`.
        """
        common, layer = attn_metadata.common, self._layer()
        query_lens = common.query_start_loc.diff()
        real_RQ = torch.arange(int(query_lens.max())) < query_lens[:, None]
        plain_THN, rotated_THP = q.double().split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        absorbed_THL = torch.einsum("thn,hnl->thl", plain_THN, layer.W_UK_T.double())
        q_RQHD = padded(torch.cat([absorbed_THL, rotated_THP], -1), real_RQ)
        fp8 = kv_c_and_k_pe_cache.dtype.itemsize == 1
        cache = kv_c_and_k_pe_cache.view(torch.uint8) if fp8 else kv_c_and_k_pe_cache
        latent_R1SD = gather(cache[:, None], common.block_table_tensor, common.max_seq_len, k_scale)
        seen_RQS = visible(query_lens, common.seq_lens, common.max_seq_len, None)
        # Keys and values are one tensor; the rotated part of what is read is dropped
        read_RQHD, _ = attend(q_RQHD, latent_R1SD, latent_R1SD, seen_RQS, self.scale)
        read_THL = read_RQHD[real_RQ][..., : self.kv_lora_rank]
        values = torch.einsum("thl,hlv->thv", read_THL, layer.W_UV.double())
        output.copy_(values.float().reshape(output.shape))

    def _layer(self) -> nn.Module:
        """Return the layer of this implementation. vLLM passes it only to `forward_mqa`."""
        layers = get_forward_context().no_compile_layers.values()
        return next(layer for layer in layers if getattr(layer, "impl", None) is self)
