"""Attention whose weights are rounded before they multiply the values,
as kernels for tensor cores do it; in plain torch.

A flash attention kernel goes through the keys tile by tile. The weights of a tile are exp(score - largest score so
far), in BF16 (Triton) or e4m3 (FlashAttention 3 with an FP8 cache) for the product, in FP32 for their sum. Which tiles
it takes depends on kernel, length and batch; a trainer that rounds, too, takes other ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from trl_fp8.engine.vllm.cpu import reference_attention as cpu_attention


def played_attention(dtype: torch.dtype, tile: int | None = None, offset: float = 256.0) -> Callable:
    """A `scaled_dot_product_attention` with weights in `dtype`, relative to the largest score up to the end
    of each tile of `tile` keys; None: one tile. `offset` multiplies them before they are rounded
    (FlashAttention 3's; of no effect in BF16).
    """

    def attend(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ) -> torch.Tensor:
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1).float() for states in (key, value))
        scores = query.float() @ key.mT * (scale or query.shape[-1] ** -0.5)
        keys = scores.shape[-1]
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask < -1e30
            scores = scores.masked_fill(hidden, -torch.inf)
        ends = range(tile or keys, keys + (tile or keys), tile or keys)
        largest = torch.stack([scores[..., : min(end, keys)].amax(-1) for end in ends], -1).nan_to_num(neginf=0.0)
        so_far = largest.repeat_interleave(tile or keys, -1)[..., :keys]
        weights = (scores - so_far).exp()
        to_last = (so_far - largest[..., -1:]).exp()
        rounded = (weights * offset).to(dtype).float() / offset
        return ((rounded * to_last) @ value / (weights * to_last).sum(-1, keepdim=True)).to(query.dtype)

    return attend


@contextmanager
def engine_with(attend: Callable | None) -> Iterator[None]:
    """A CPU engine's reference attention computed by `attend`; None: as it is."""
    original = cpu_attention.F
    if attend is not None:
        cpu_attention.F = SimpleNamespace(
            scaled_dot_product_attention=lambda q, k, v, visible, **options: attend(q, k, v, visible, **options)
        )
    try:
        yield
    finally:
        cpu_attention.F = original


@contextmanager
def trainer_with(attend: Callable | None) -> Iterator[None]:
    """torch's attention, which transformers calls, computed by `attend`; None: as it is."""
    original = F.scaled_dot_product_attention
    if attend is not None:
        F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
