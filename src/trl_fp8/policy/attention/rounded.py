"""Attention whose weights are rounded to e4m3, as GPU kernels over an FP8 KV cache round them; in plain torch.

    s = scaling * q k^T          w = exp(s - largest s of the query)          sum(w) in FP32
    output = e4m3(offset * w) / offset @ v / sum(w)                           rounding is passed straight through

A kernel takes the keys in tiles and rounds relative to the largest score so far; which tiles, depends on kernel,
length and batch. Here it is the largest of all, which is the same weight wherever that comes in the first tile
(docs/numerics.md says how much of the mismatch the difference leaves).

Shape letters: B sequences, H query heads, G key heads, T queries, S keys, D head size.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trl_fp8.quantization.e4m3 import saturating_cast_, straight_through


def rounded_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, offset: float, chunk: int = 256
) -> Tensor:
    """Attention in FP32 with weights rounded to e4m3: `[B, T, H, D]`; a query that sees no key gets zeros.

    Args:
        query, key, value: `[B, H, T, D]` and `[B, G, S, D]`, with H a multiple of G.
        mask: `[B or 1, 1, T, S]`, as transformers makes it: true where a key is seen, or added to the scores. None:
            causal, and T = S.
        scaling: Multiplier applied to the scores.
        offset: Multiplier applied to the weights before rounding: 256 in FlashAttention 3, 1 in vLLM's Triton kernel.
        chunk: Queries whose scores are held at a time, and made again in the backward.
    """
    if mask is None and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries over {key.shape[2]} keys without a mask: which keys a query sees is not "
            "known. Pass a mask."
        )
    outputs, options = [], {"use_reentrant": False, "preserve_rng_state": False}
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, query.shape[2], chunk):
            end = min(start + chunk, query.shape[2])
            seen = end if mask is None else key.shape[2]
            part = (query[:, :, start:end], key[:, :, :seen], value[:, :, :seen])
            masked = None if mask is None else mask[..., start:end, :]
            outputs.append(checkpoint(_attend, *part, masked, start, scaling, offset, **options))
    return torch.cat(outputs, dim=1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, start: int, scaling: float, offset: float
) -> Tensor:
    """`[B, T, H, D]` of the queries from number `start` on."""
    (batch, heads, queries, size), groups = query.shape, key.shape[1]
    # Heads of a group beside each other: no copies of the keys
    folded = query.float().reshape(batch, groups, -1, size)
    scores = (folded @ key.float().mT * scaling).view(batch, groups, heads // groups, queries, -1)
    if mask is None:
        numbers = torch.arange(key.shape[2], device=query.device)
        mask = numbers <= start + torch.arange(queries, device=query.device)[:, None]
    else:
        mask = mask[:, :, None]
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    largest = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    rounded = straight_through(weights, lambda w: saturating_cast_(w * offset).float().div_(offset))
    rounded = rounded.view(batch, groups, -1, key.shape[2])
    output = (rounded @ value.float()).view(batch, groups, heads // groups, queries, size) / total
    return output.view(batch, heads, queries, size).transpose(1, 2)
