"""FlashAttention 3 with one kernel for prefill, decode and the trainer: a backend of vLLM, and a call of its kernel.

FlashAttention reads the keys of a query in tiles, the last tile first. It rounds relative to the largest score so far,
and over an FP8 cache it also rounds each tile's weights to e4m3. Tiles start at multiples of their width. A query's
bits do not depend on other queries of its block, nor on tiles that the query does not see. So the output depends on
the width and the order of tiles, and on nothing else in a batch. The widths below are those in the names of the
kernels in vLLM 0.31's wheel; `hopper/` of vLLM's fork of flash-attention says when FlashAttention 3 (FA3) chooses
each. The arguments in the last column keep width and order the same in every batch:

    condition                     what FA3 would choose                   what this module passes instead
    at most 64 rows (queries x    a tile of 96 keys instead of 192 (FP8,  max_seqlen_q of at least 256, which is only
      heads per key head)           head size 128), or of 192 instead of    an upper bound: the lengths come from
                                    128 (BF16, head size 64)                cu_seqlens_q
    a single query                no causal mask, and other tiles for     the same max_seqlen_q
                                    BF16 with head size 64
    a sliding window of at least  no window, and so another tile (head    max_seqlen_k of the engine's max_model_len,
      max_seqlen_k tokens           size 256: 64 keys with a window, 80     or of the longest sequence if that is
                                    or 128 without)                         longer
    no page table, or pages that  other kernels, some with wider tiles    a table of pages of the engine's size, also
      consist of whole tiles                                                for the trainer's sequences
    few queries over many keys    splits of the keys, added up at the     num_splits=1, no scheduler metadata
                                    end
    a common prefix in the batch  a call for the prefix alone (cascade)   False from `use_cascade_attention`

A trainer has no KV cache. `PackedAttention` therefore writes its packed sequences into pages, with the operator that
writes the engine's cache, and rounds q with the engine's own layer. On Ada and Blackwell vLLM attends with a Triton
kernel that keeps no log-sum-exp; `engine_invariance.require_cuda_kernels` refuses those GPUs.

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


MIN_MAX_SEQLEN_Q = 256  # more rows than any tile has, so FA3 never chooses a tile for few rows
SPLITS = 1  # number of parts into which FA3 splits the keys


@contextmanager
def invariant_attention() -> Iterator[None]:
    """Let engines that start inside the block use `InvariantFlashAttention`, by vLLM's public override."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{InvariantFlashAttention.__qualname__}")
    try:
        yield
    finally:
        AttentionBackendEnum.FLASH_ATTN.clear_override()


class InvariantFlashAttention(FlashAttentionBackend):
    """vLLM's FlashAttention backend with the arguments in the module's table."""

    get_impl_cls = staticmethod(lambda: InvariantFlashAttentionImpl)
    get_builder_cls = staticmethod(lambda: InvariantMetadataBuilder)


class InvariantMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds metadata with the arguments in the module's table."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.aot_schedule = False  # no scheduler metadata: it depends on both max_seqlens

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return replace(
            metadata,
            max_num_splits=SPLITS,
            max_query_len=max(metadata.max_query_len, MIN_MAX_SEQLEN_Q),
            max_seq_len=self.model_config.max_model_len,
        )

    def use_cascade_attention(self, *args, **kwargs) -> bool:
        return False


class InvariantFlashAttentionImpl(FlashAttentionImpl):
    """vLLM's implementation. Raises `ValueError` for a layer whose attention `PackedAttention` does not compute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.max_model_len = get_current_vllm_config().model_config.max_model_len  # as the builder's `max_seq_len`
        refused = {
            f"FlashAttention {self.vllm_flash_attn_version}": self.vllm_flash_attn_version != 3,
            f"{self.attn_type} attention": self.attn_type != AttentionType.DECODER,
            "KV sharing between layers": self.kv_sharing_target_layer_name is not None,
            "attention sinks": self.sinks is not None,
            "a context split over ranks": self.dcp_world_size > 1,
        }
        names = [name for name, is_used in refused.items() if is_used]
        if names:
            raise ValueError(
                f"fp8_forward='one_forward': the engine would run {', '.join(names)} in this model (head size "
                f"{self.head_size}), which its trainer does not compute. Set fp8_forward='off'."
            )


class PackedAttention:
    """Attention of one layer with the kernel of the engine's prefill and decode; see `engine.kernels.Attention`."""

    def __init__(self, layer: Attention):
        if not isinstance(layer.impl, InvariantFlashAttentionImpl):
            raise RuntimeError(
                f"the engine attends with {type(layer.impl).__name__}, expected InvariantFlashAttentionImpl: prefill "
                "and decode may run different kernels. Start the engine with a SharedKernelsPart."
            )
        self._layer = layer
        impl = layer.impl
        self.scaling: float = impl.scale
        left = impl.sliding_window[0]  # number of earlier keys that a query sees; -1: all
        self.window: int | None = left + 1 if left >= 0 else None
        self.softcap: float | None = impl.logits_soft_cap or None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        layer = self._layer
        impl = layer.impl
        if layer.kv_cache_dtype.startswith("fp8") != (scales is not None):
            raise RuntimeError(f"scales {scales} for a layer whose KV cache is {layer.kv_cache_dtype!r}.")
        page_size = layer.kv_cache.shape[2]
        pages = pages_of(starts, longest, tokens=len(query), slots=page_size)
        # Pages `[P, S, G, D]` as in the engine's cache. They start as zeros, because slots behind a sequence's end
        # have weight 0, and 0 times a NaN in uninitialized memory would be NaN
        dtype = key.dtype if scales is None else torch.uint8
        shape = pages.count, pages.slots, *key.shape[1:]
        caches = [key.new_zeros(shape, dtype=dtype), key.new_zeros(shape, dtype=dtype)]
        if scales is None:  # a BF16 cache: the operator requires scales, but does not read them
            k_scale = layer._k_scale
            v_scale = layer._v_scale
        else:
            k_scale, v_scale = scales[1:]
        reshape_and_cache_flash(key, value, *caches, pages.slots_N, layer.kv_cache_dtype, k_scale, v_scale)
        kernel_query = query
        descale = {}
        if scales is not None:
            query_codes, _ = layer.query_quant(query.flatten(1), scales[0])
            kernel_query = query_codes.view(query.shape)
            caches = [cache.view(E4M3) for cache in caches]
            by_head = [scale.expand(len(starts) - 1, key.shape[1]) for scale in scales]  # `[R, G]` each
            descale = dict(zip(("q_descale", "k_descale", "v_descale"), by_head, strict=True))
        output, lse_HN = flash_attn_varlen_func(
            q=kernel_query,
            k=caches[0],
            v=caches[1],
            out=torch.empty_like(query),
            cu_seqlens_q=starts,
            max_seqlen_q=max(longest, MIN_MAX_SEQLEN_Q),
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
        # Return q, k and v as the engine rounds them. Read k and v back from the cache, in the order of the tokens
        codes = [kernel_query]
        for cache in caches:
            slots = cache.view(torch.uint8).flatten(0, 1)
            codes.append(slots[pages.slots_N].view(E4M3))
        rounded = [code.to(query.dtype) * scale for code, scale in zip(codes, scales, strict=True)]
        return output, lse_HN, tuple(rounded)
