"""FlashAttention 3 with one kernel for prefill, decode and the trainer: a backend of vLLM, a call on packed sequences.

FlashAttention reads the keys of a query in tiles, the last tile first. It rounds relative to the largest score so far,
and over an FP8 cache it also rounds each tile's weights to e4m3. Tiles start at multiples of their width. A query's
bits do not depend on other queries of its block, nor on tiles that it does not see. So the output depends on the width
and the order of tiles, and on nothing else of a batch. The names of the kernels in vLLM 0.31's wheel give the widths
below; `hopper/` of vLLM's fork of flash-attention says when each is chosen. These arguments keep width and order:

    what would choose another width or order                                 what is always passed
    at most 64 rows (queries x heads per key head): 96 keys instead of 192   max_seqlen_q of 256 at least. It is a
        (FP8, head size 128), 192 instead of 128 (BF16, head size 64)        bound: lengths come from cu_seqlens_q
    a single query: no causal mask, other tiles at BF16 and head size 64     that max_seqlen_q, too
    a sliding window no smaller than max_seqlen_k: it is dropped, and        max_seqlen_k of the engine's max_model_len
        with it narrower tiles (head size 256: 64 instead of 80 or 128)
    no page table, or pages that are whole tiles: other kernels, some wider  pages of the engine's size, here too
    few queries over many keys: keys are split, parts are added up           num_splits=1, no scheduler metadata
    a common prefix: attended to by itself (cascade)                         never

So the trainer's packed sequences are written into pages, one after another, by the operator that writes the engine's
cache, and q is rounded by the engine's own layer. On Ada and Blackwell vLLM attends with a Triton kernel that keeps no
log-sum-exp; `engine_invariance.require_cuda_kernels` refuses them.

Shape letters: N tokens of all sequences, R sequences, H query heads, G key heads, D head size, P pages of S slots.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, reshape_and_cache_flash
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from trl_fp8.quantization.codec.e4m3 import E4M3

from .followed_attention import pages_of


QUERIES = 256  # more rows than any tile has
SPLITS = 1


@contextmanager
def invariant_attention() -> Iterator[None]:
    """Let engines that start inside the block use the pinned backend, by vLLM's public override."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{InvariantFlashAttention.__qualname__}")
    try:
        yield
    finally:
        AttentionBackendEnum.FLASH_ATTN.clear_override()


class InvariantFlashAttention(FlashAttentionBackend):
    """vLLM's backend with the arguments in the table above."""

    get_impl_cls = staticmethod(lambda: InvariantFlashAttentionImpl)
    get_builder_cls = staticmethod(lambda: InvariantMetadataBuilder)


class InvariantMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds metadata that depends on the lengths in a batch, and on nothing else of it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.aot_schedule = False  # its tensors depend on max_seqlen_q and max_seqlen_k

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return replace(
            metadata,
            max_num_splits=SPLITS,
            max_query_len=max(metadata.max_query_len, QUERIES),
            max_seq_len=self.model_config.max_model_len,
        )

    def use_cascade_attention(self, *args, **kwargs) -> bool:
        return False


class InvariantFlashAttentionImpl(FlashAttentionImpl):
    """vLLM's implementation. `ValueError` unless it is version 3, for a decoder without sinks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.max_model_len = get_current_vllm_config().model_config.max_model_len  # as in the builder
        unknown = {
            f"FlashAttention {self.vllm_flash_attn_version}": self.vllm_flash_attn_version != 3,
            f"{self.attn_type} attention": self.attn_type != AttentionType.DECODER,
            "KV sharing between layers": self.kv_sharing_target_layer_name is not None,
            "attention sinks": self.sinks is not None,
            "a context split over ranks": self.dcp_world_size > 1,
        }
        names = [name for name, is_used in unknown.items() if is_used]
        if names:
            raise ValueError(
                f"fp8_forward='one_forward': the engine would run {', '.join(names)} in this model (head size "
                f"{self.head_size}), which its trainer does not compute. Set fp8_forward='off'."
            )


class PackedAttention:
    """Attention of one layer, as the engine's prefill and its decode compute it; see `engine.kernels.Attention`."""

    def __init__(self, layer: Attention):
        if not isinstance(layer.impl, InvariantFlashAttentionImpl):
            raise RuntimeError(
                f"the engine attends with {type(layer.impl).__name__}, expected InvariantFlashAttentionImpl: prefill "
                "and decode may run different kernels. Start the engine with a SharedKernelsPart."
            )
        self._layer, impl = layer, layer.impl
        self.scaling: float = impl.scale
        self.window: int | None = impl.sliding_window[0] + 1 if impl.sliding_window[0] >= 0 else None
        self.softcap: float | None = impl.logits_soft_cap or None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        layer, impl = self._layer, self._layer.impl
        if layer.kv_cache_dtype.startswith("fp8") != (scales is not None):
            raise RuntimeError(f"scales {scales} for a layer whose KV cache is {layer.kv_cache_dtype!r}.")
        pages = pages_of(starts, longest, len(query), layer.kv_cache.shape[2])
        # Pages `[P, S, G, D]` as in the engine's cache. Zeros: slots behind a sequence's end have weight 0, but
        # 0 times NaN is NaN
        dtype = key.dtype if scales is None else torch.uint8
        caches = [key.new_zeros(pages.count, pages.slots, *key.shape[1:], dtype=dtype) for _ in "kv"]
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if scales is None else scales[1:]
        reshape_and_cache_flash(key, value, *caches, pages.slots_N, layer.kv_cache_dtype, k_scale, v_scale)
        seen, descale = query, {}
        if scales is not None:
            seen = layer.query_quant(query.flatten(1), scales[0])[0].view(query.shape)
            caches = [cache.view(E4M3) for cache in caches]
            shape = len(starts) - 1, key.shape[1]
            descale = {f"{name}_descale": scale.expand(shape) for name, scale in zip("qkv", scales, strict=True)}
        output, lse_HN = flash_attn_varlen_func(
            q=seen,
            k=caches[0],
            v=caches[1],
            out=torch.empty_like(query),
            cu_seqlens_q=starts,
            max_seqlen_q=max(longest, QUERIES),
            seqused_k=starts.diff(),
            max_seqlen_k=max(longest, impl.max_model_len),
            softmax_scale=impl.scale,
            causal=True,
            window_size=list(impl.sliding_window),
            softcap=impl.logits_soft_cap,
            block_table=pages.table,
            return_softmax_lse=True,
            fa_version=impl.vllm_flash_attn_version,
            num_splits=SPLITS,
            **descale,
        )
        if scales is None:
            return output, lse_HN, (query, key, value)
        codes = [seen, *(cache.view(torch.uint8).flatten(0, 1)[pages.slots_N].view(E4M3) for cache in caches)]
        rounded = [code.to(query.dtype) * scale for code, scale in zip(codes, scales, strict=True)]
        return output, lse_HN, tuple(rounded)
