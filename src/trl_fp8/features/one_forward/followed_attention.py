"""Attention of a policy that follows an engine: the engine's kernel over packed sequences, and its backward.

    forward    output, lse = engine(q, k, v)                     lse: log-sum-exp of each query's scores
    backward   s = scaling * q k^T,  p = exp(s - lse)            q, k, v as the kernel rounded them
               dv = p^T do,  dp = do v^T,  ds = p * (dp - sum(p * dp))
               dq = scaling * ds k,  dk = scaling * ds^T q,  d sink = - sum(exp(sink - lse) * sum(p * dp))

A head's sink is one more score of each query, without a value vector; lse includes it. The gradient is that of exact
attention over the rounded q, k, v and is passed on unchanged to q, k, v. The backward needs lse and no second softmax.
torch's FlashAttention computes it on a GPU, plain torch elsewhere.

An FP8 kernel also rounds p before it adds up its output, and FlashAttention's backward computes sum(p * dp) from that
output, as output * do. That error is the same for all keys of a query: it would not average out. Where q, k, v were
rounded, the GPU therefore computes output and lse again in BF16 for the backward.

Shape letters: B rows, T tokens of a padded row, N tokens of all sequences, R sequences, L tokens of the longest, H
query heads, G key heads, M = H / G, D head size, C queries of a chunk, S keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_fp8.engine.kernels import EngineKernels


SINKS = "s_aux"  # transformers' keyword for attention sinks
SCORES = 2**25  # of one chunk, in FP32 128 MiB
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]]


@dataclass(frozen=True)
class Sequences:
    """The sequences of a padded batch, one after another, as kernels for packed sequences want them."""

    shape: tuple[int, int]  # B, T
    starts: Tensor  # first token of each sequence, and the end; int32 `[R + 1]`
    longest: int  # an upper bound of their lengths
    rows_N: Tensor | None  # indices of real tokens among B * T; None: all B * T, padding as sequences, too

    @classmethod
    def of(cls, real_BT: Tensor | None, rows: int, length: int, device: torch.device) -> "Sequences":
        """Return the sequences of a batch in which `real_BT` marks the tokens that are not padding; None: all.

        Padding is on either side of a row. To pack tokens the host has to know their number. On a GPU it would have to
        wait for it, so there nothing is packed: the padding on each side, even if empty, is a sequence of its own.
        """
        rows_N, end = None, rows * length
        first_B = torch.arange(0, end, length, device=device)
        if real_BT is None:
            starts = first_B
        elif device.type == "cpu":
            lengths_B = real_BT.sum(-1)
            starts = lengths_B.cumsum(0) - lengths_B
            rows_N = real_BT.flatten().nonzero()[:, 0]
            end = len(rows_N)
        else:
            real_B = first_B + real_BT.int().argmax(-1)
            starts = torch.stack([first_B, real_B, real_B + real_BT.sum(-1)], -1).flatten()
        return cls((rows, length), torch.cat([starts, starts.new_full((1,), end)]).int(), length, rows_N)

    def packed(self, states_BHTD: Tensor) -> Tensor:
        """Return `[N, H, D]` of `[B, H, T, D]`."""
        flat = states_BHTD.transpose(1, 2).flatten(0, 1)
        return flat if self.rows_N is None else flat[self.rows_N]

    def padded(self, states_NHD: Tensor) -> Tensor:
        """Return `[B, T, H, D]` of `[N, H, D]`; padding is zero."""
        if self.rows_N is not None:
            rows, length = self.shape
            padding = states_NHD.new_zeros(rows * length, *states_NHD.shape[1:])
            states_NHD = padding.index_copy(0, self.rows_N, states_NHD)
        return states_NHD.unflatten(0, self.shape)


class FollowedAttention:
    """Mixed into `OneForward`; see `policy.hook.Replacement`.

    It reads no mask of transformers, because the kernel knows which tokens a query sees.
    """

    kernels: EngineKernels

    def before_forward(self, real_BT: Tensor | None, shape: tuple[int, int], device: torch.device) -> Sequences:
        return Sequences.of(real_BT, *shape, device)

    def attend(
        self, layer: int, states: tuple[Tensor, ...], batch: Sequences, scales: Tensor | None, options: dict
    ) -> Tensor:
        engine = self.kernels.attention(layer)

        def kernel(*packed: Tensor) -> tuple:
            return engine(*packed, batch.starts, batch.longest, scales)

        packed = (batch.packed(tensor.to(torch.bfloat16)) for tensor in states)
        mask = engine.scaling, engine.window, engine.softcap
        return batch.padded(packed_attention(kernel, *packed, batch.starts, batch.longest, *mask, options.get(SINKS)))


def packed_attention(
    engine: Kernel,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the output of `engine(query, key, value)`, `[N, H, D]`, with gradients for q, k, v and sinks.

    `engine` is called without gradients. It returns the output, lse `[H, N]` and q, k, v as it rounded them, or the
    same objects if it rounded none. `sinks_H` are the policy's, for their gradient; the engine has its own. The other
    arguments are those of `engine.kernels.Attention`.
    """
    options = (starts, longest, scaling, window, softcap)
    return _PackedAttention.apply(engine, query_NHD, key_NGD, value_NGD, sinks_H, *options)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, engine, query, key, value, sinks_H, starts, longest, scaling, window, softcap):
        output, lse_HN, rounded = engine(query, key, value)
        ctx.exact = all(after is before for after, before in zip(rounded, (query, key, value), strict=True))
        ctx.dtypes = query.dtype, key.dtype, value.dtype
        ctx.options = longest, scaling, window, softcap
        ctx.save_for_backward(*rounded, output, lse_HN, starts, sinks_H)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        *rounded, output, lse_HN, starts, sinks_H = ctx.saved_tensors
        longest, scaling, window, softcap = ctx.options
        if in_flash_attention(rounded[0], softcap):
            softmax = (output, lse_HN) if ctx.exact else None
            found = flash_gradients(rounded, softmax, gradient, starts, longest, scaling, window)
        else:
            found = plain_gradients(rounded, lse_HN, gradient, starts, longest, scaling, window, softcap)
        dq, dk, dv = (each.to(dtype) for each, dtype in zip(found, ctx.dtypes, strict=True))
        of_sinks = sinks_gradient(sinks_H, lse_HN, output, gradient) if ctx.needs_input_grad[4] else None  # 4: sinks_H
        return None, dq, dk, dv, of_sinks, None, None, None, None, None


def in_flash_attention(query: Tensor, softcap: float | None) -> bool:
    """Return whether torch's FlashAttention has this backward: no soft cap, 16 bits, head size 8 to 256 by 8."""
    sizes = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and sizes and not softcap


def flash_gradients(
    rounded: list[Tensor],
    softmax: tuple[Tensor, Tensor] | None,
    gradient_NHD: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v by torch's FlashAttention. `softmax`: output and lse `[H, N]`, or None."""
    lengths = (starts, starts, longest, longest, 0.0, True)  # of queries, of keys; no dropout, causal
    seen = {"scale": scaling, "window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    query = rounded[0]
    if softmax is None:  # the engine computed with p in e4m3
        softmax = torch.ops.aten._flash_attention_forward(*rounded, *lengths, False, **seen)[:2]
    no_dropout = query.new_empty(2, dtype=torch.uint64), query.new_empty(0, dtype=torch.uint64)
    gradient = gradient_NHD.to(query.dtype).contiguous()
    return torch.ops.aten._flash_attention_backward(gradient, *rounded, *softmax, *lengths, *no_dropout, **seen)


def plain_gradients(
    rounded: list[Tensor],
    lse_HN: Tensor,
    gradient_NHD: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    scores: int = SCORES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v, at least in FP32, with about `scores` scores in memory at a time."""
    dtype = torch.promote_types(gradient_NHD.dtype, torch.float32)
    sequence_N, position_N = _token_places(starts, len(gradient_NHD))
    rows_N = sequence_N * longest + position_N  # among `[R * longest]`
    sequences = len(starts) - 1
    heads, groups = rounded[0].shape[1], rounded[1].shape[1]

    def padded(packed: Tensor, fill: float = 0.0) -> Tensor:
        """Return `[R, G, heads / G, L, ...]` of `[N, heads, ...]`."""
        filled = packed.new_full((sequences * longest, *packed.shape[1:]), fill, dtype=dtype)
        filled[rows_N] = packed.to(dtype)
        return filled.unflatten(0, (sequences, longest)).transpose(1, 2).unflatten(1, (groups, -1))

    q_RGMLD, do_RGMLD = padded(rounded[0]), padded(gradient_NHD)
    k_RGLD, v_RGLD = padded(rounded[1]).squeeze(2), padded(rounded[2]).squeeze(2)
    lse_RGML = padded(lse_HN.t(), float("inf"))  # padding then attends to nothing
    dq, dk, dv = torch.zeros_like(q_RGMLD), torch.zeros_like(k_RGLD), torch.zeros_like(v_RGLD)
    position = torch.arange(longest, device=starts.device)
    chunk = max(1, scores // (sequences * heads * longest))
    for start in range(0, longest, chunk):
        end = min(start + chunk, longest)
        first = 0 if window is None else max(0, start - window + 1)
        queries, keys = slice(start, end), slice(first, end)
        distance_CS = position[queries, None] - position[keys]
        hidden_CS = (distance_CS < 0) if window is None else (distance_CS < 0) | (distance_CS >= window)
        q, do, k, v = q_RGMLD[..., queries, :], do_RGMLD[..., queries, :], k_RGLD[:, :, keys], v_RGLD[:, :, keys]
        s_RGMCS = scaling * _per_group(q, k.mT)
        if softcap:
            bent = torch.tanh(s_RGMCS / softcap)
            s_RGMCS = softcap * bent
        p = (s_RGMCS - lse_RGML[..., queries, None]).exp_().masked_fill_(hidden_CS, 0.0)
        dp = _per_group(do, v.mT)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        if softcap:
            ds = ds * (1 - bent * bent)  # derivative of the soft cap
        dq[..., queries, :] = scaling * _per_group(ds, k)
        dk[:, :, keys] += scaling * ds.flatten(2, 3).mT @ q.flatten(2, 3)
        dv[:, :, keys] += p.flatten(2, 3).mT @ do.flatten(2, 3)

    def packed(states: Tensor) -> Tensor:
        """Undo `padded`: `[N, heads, D]` of `[R, G, M, L, D]` or `[R, G, L, D]`."""
        return states.flatten(1, -3).transpose(1, 2).flatten(0, 1)[rows_N]

    return packed(dq), packed(dk), packed(dv)


def sinks_gradient(sinks_H: Tensor, lse_HN: Tensor, output_NHD: Tensor, gradient_NHD: Tensor) -> Tensor:
    """Return the gradient of the sinks `[H]`, with sum(p * dp) computed as output * gradient."""
    wide = lse_HN.dtype
    share_HN = (sinks_H.to(torch.bfloat16).to(wide)[:, None] - lse_HN).exp()  # the engine's sinks are BF16
    return -(share_HN * (output_NHD.to(wide) * gradient_NHD.to(wide)).sum(-1).t()).sum(-1).to(sinks_H.dtype)


def _per_group(left_RGMCx: Tensor, right_RGxy: Tensor) -> Tensor:
    """Return the product `[R, G, M, C, y]`, computed as one matrix for all M heads of a group."""
    return (left_RGMCx.flatten(2, 3) @ right_RGxy).unflatten(2, left_RGMCx.shape[2:4])


def _token_places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return each token's sequence, and its position there, int64 `[N]`. Does not synchronize with the device."""
    starts = starts.long()
    numbers = torch.arange(len(starts) - 1, device=starts.device)
    sequence_N = torch.repeat_interleave(numbers, starts.diff(), output_size=tokens)
    return sequence_N, torch.arange(tokens, device=starts.device) - starts[sequence_N]


class Pages(NamedTuple):
    """Places of tokens in a paged KV cache, where each sequence starts a page and its pages follow one another."""

    slots: int  # tokens of a page
    count: int  # an upper bound of the pages in use; their exact number would make the host wait
    slots_N: Tensor  # each token's slot, counted over all pages, int64
    table: Tensor  # each sequence's pages, int32 `[R, pages of the longest]`; past its last one any valid page


def pages_of(starts: Tensor, longest: int, tokens: int, slots: int) -> Pages:
    """Return pages for sequences that begin at the first R of `starts` `[R + 1]` and have `tokens` in all."""
    used_R = (starts.diff().long() + slots - 1) // slots
    first_R = used_R.cumsum(0) - used_R
    count = tokens // slots + len(used_R)
    sequence_N, position_N = _token_places(starts, tokens)
    table = first_R[:, None] + torch.arange(-(-longest // slots), device=starts.device)
    table = table.clamp_max_(count - 1).to(torch.int32)
    return Pages(slots, count, first_R[sequence_N] * slots + position_N, table)
