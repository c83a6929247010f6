"""Attention of a policy that follows an engine: the engine's kernel over packed sequences, and its backward.

    forward    output, lse = engine(q, k, v)                     lse is the log-sum-exp of each query's scores
    backward   s = scaling * q k^T,  p = exp(s - lse)            q, k, v as the kernel rounded them
               dv = p^T do,  dp = do v^T,  ds = p * (dp - sum(p * dp))
               dq = scaling * ds k,  dk = scaling * ds^T q,  d sink = - sum(exp(sink - lse) * sum(p * dp))

`do` is the gradient of the output. A head's sink is one more score of each query, without a value vector; lse includes
this score. The gradients are those of exact attention over the rounded q, k, v, and are passed on unchanged to q, k, v
before rounding. The backward computes p from lse, without a second softmax: in torch's FlashAttention where
`in_flash_attention` allows it, else in plain torch.

An FP8 kernel also rounds p before it sums p v, so its output has an error. FlashAttention's backward computes
sum(p * dp) as sum(do * output). There the output's error would be the same for all keys of a query, and would not
average out. If q, k and v were rounded, output and lse are therefore computed once more in BF16 before that backward.

transformers calls `FollowedAttention.attend` with a padded batch. `Sequences` packs the batch, and `packed_attention`
calls the engine's kernel. `flash_gradients` and `plain_gradients` are the two backwards. `Pages` are for kernels that
read k and v from a paged cache (engine_flash_attention.py).

Shape letters: B rows, T tokens of a padded row, N tokens of all sequences, R sequences, L tokens of the longest
sequence, H query heads, G key heads, M = H / G, D head size, C queries of a chunk, S keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_fp8.engine.kernels import EngineKernels


SINKS = "s_aux"  # transformers' keyword for attention sinks
SCORES = 2**25  # number of scores in one chunk of the plain backward: 128 MiB in FP32
# (q, k, v) -> (output, lse, (rounded q, k, v))
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]]


@dataclass(frozen=True)
class Sequences:
    """The sequences of a padded batch, packed one after another."""

    shape: tuple[int, int]  # (B, T)
    starts: Tensor  # index of each sequence's first token, and N at the end; int32 `[R + 1]`
    longest: int  # an upper bound of the sequences' lengths
    rows_N: Tensor | None  # indices of packed tokens among B * T; None: all are packed, padding as separate sequences

    @classmethod
    def of(cls, real_BT: Tensor | None, rows: int, length: int, device: torch.device) -> "Sequences":
        """Return the sequences of `[rows, length]` tokens. `real_BT` is False at padding; None: there is no padding.

        Padding may be on both sides of a row. On a CPU padding is left out. On a GPU the host would have to wait for
        the number of tokens that are left. So on a GPU the padding on each side of a row is a sequence of its own,
        which may be empty.
        """
        rows_N = None
        tokens = rows * length  # number of packed tokens
        row_starts_B = torch.arange(0, rows * length, length, device=device)
        if real_BT is None:
            starts = row_starts_B
        elif device.type == "cpu":
            lengths_B = real_BT.sum(-1)
            starts = lengths_B.cumsum(0) - lengths_B
            rows_N = real_BT.flatten().nonzero()[:, 0]
            tokens = len(rows_N)
        else:
            # Three sequences for each row: padding on the left, real tokens, padding on the right
            real_starts_B = row_starts_B + real_BT.int().argmax(-1)
            real_ends_B = real_starts_B + real_BT.sum(-1)
            starts = torch.stack([row_starts_B, real_starts_B, real_ends_B], -1).flatten()
        starts = torch.cat([starts, starts.new_full((1,), tokens)]).int()
        return cls(shape=(rows, length), starts=starts, longest=length, rows_N=rows_N)

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
    """The attention of `OneForward`, computed by the engine's kernels; implements `policy.hook.Replacement`.

    transformers' mask is not used: the kernels are causal and know the layer's window.
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

        query, key, value = (batch.packed(state.to(torch.bfloat16)) for state in states)
        output_NHD = packed_attention(
            kernel,
            query,
            key,
            value,
            starts=batch.starts,
            longest=batch.longest,
            scaling=engine.scaling,
            window=engine.window,
            softcap=engine.softcap,
            sinks_H=options.get(SINKS),
        )
        return batch.padded(output_NHD)


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

    `engine` is called without gradients. It returns the output, lse `[H, N]`, and the rounded q, k, v. A kernel that
    does not round has to return its arguments themselves as q, k, v. `sinks_H` are the policy's sinks, passed only to
    get a gradient: the kernel reads the engine's sinks. The other arguments are those of `engine.kernels.Attention`.
    """
    options = (starts, longest, scaling, window, softcap)
    return _PackedAttention.apply(engine, query_NHD, key_NGD, value_NGD, sinks_H, *options)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, engine, query, key, value, sinks_H, starts, longest, scaling, window, softcap):
        output, lse_HN, rounded = engine(query, key, value)
        # Whether the kernel rounded neither q nor k nor v
        ctx.is_exact = all(after is before for after, before in zip(rounded, (query, key, value), strict=True))
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
            softmax = (output, lse_HN) if ctx.is_exact else None  # None: `flash_gradients` computes both once more
            dqkv = flash_gradients(rounded, softmax, gradient, starts, longest, scaling, window)
        else:
            dqkv = plain_gradients(rounded, lse_HN, gradient, starts, longest, scaling, window, softcap)
        dq, dk, dv = (each.to(dtype) for each, dtype in zip(dqkv, ctx.dtypes, strict=True))
        d_sinks = None
        if ctx.needs_input_grad[4]:  # the gradient of `sinks_H`
            d_sinks = sinks_gradient(sinks_H, lse_HN, output, gradient)
        return None, dq, dk, dv, d_sinks, None, None, None, None, None


def in_flash_attention(query: Tensor, softcap: float | None) -> bool:
    """Return whether torch's FlashAttention has this backward: CUDA, 16 bits, no soft cap, head size 8, 16 ... 256."""
    head_size = query.shape[-1]
    has_head_size = head_size % 8 == 0 and head_size <= 256
    has_16_bits = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and has_16_bits and has_head_size and not softcap


def flash_gradients(
    rounded: list[Tensor],
    softmax: tuple[Tensor, Tensor] | None,
    gradient_NHD: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v by torch's FlashAttention.

    `softmax` is the output and lse `[H, N]` of the forward. If it is None, both are computed once more, without sinks:
    on a GPU, one forward refuses models with sinks (engine_flash_attention.py).
    """
    dropout = 0.0
    is_causal = True
    # Starts of sequences, and their largest length, first of queries and then of keys
    options = (starts, starts, longest, longest, dropout, is_causal)
    left = -1 if window is None else window - 1  # -1: no window
    named = {"scale": scaling, "window_size_left": left, "window_size_right": 0}
    query = rounded[0]
    if softmax is None:
        return_debug_mask = False
        output, lse, *_ = torch.ops.aten._flash_attention_forward(*rounded, *options, return_debug_mask, **named)
        softmax = (output, lse)
    # The state of the random numbers for dropout: two numbers and an unused tensor
    random_state = query.new_empty(2, dtype=torch.uint64), query.new_empty(0, dtype=torch.uint64)
    gradient = gradient_NHD.to(query.dtype).contiguous()
    return torch.ops.aten._flash_attention_backward(gradient, *rounded, *softmax, *options, *random_state, **named)


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
    """Return gradients of q, k and v, in FP32 or wider. Queries are processed in chunks of about `scores` scores."""
    dtype = torch.promote_types(gradient_NHD.dtype, torch.float32)
    sequence_N, position_N = _token_places(starts, len(gradient_NHD))
    rows_N = sequence_N * longest + position_N  # each token's row in a padded tensor `[R * L, ...]`
    sequences = len(starts) - 1
    heads, groups = rounded[0].shape[1], rounded[1].shape[1]

    def padded(packed: Tensor, fill: float = 0.0) -> Tensor:
        """Return `[R, G, heads / G, L, ...]` of `[N, heads, ...]`."""
        filled = packed.new_full((sequences * longest, *packed.shape[1:]), fill, dtype=dtype)
        filled[rows_N] = packed.to(dtype)
        return filled.unflatten(0, (sequences, longest)).transpose(1, 2).unflatten(1, (groups, -1))

    q_RGMLD = padded(rounded[0])
    k_RGLD = padded(rounded[1]).squeeze(2)
    v_RGLD = padded(rounded[2]).squeeze(2)
    do_RGMLD = padded(gradient_NHD)
    lse_RGML = padded(lse_HN.t(), float("inf"))  # so that p is 0 for queries that are padding
    dq = torch.zeros_like(q_RGMLD)
    dk = torch.zeros_like(k_RGLD)
    dv = torch.zeros_like(v_RGLD)
    position = torch.arange(longest, device=starts.device)
    chunk = max(1, scores // (sequences * heads * longest))
    for start in range(0, longest, chunk):  # queries `start .. end` of all sequences at a time
        end = min(start + chunk, longest)
        first_key = 0 if window is None else max(0, start - window + 1)  # the first key that query `start` sees
        queries = slice(start, end)
        keys = slice(first_key, end)
        distance_CS = position[queries, None] - position[keys]
        hidden_CS = distance_CS < 0  # keys after the query
        if window is not None:
            hidden_CS = hidden_CS | (distance_CS >= window)
        q = q_RGMLD[..., queries, :]
        do = do_RGMLD[..., queries, :]
        k = k_RGLD[:, :, keys]
        v = v_RGLD[:, :, keys]
        # The formulas at the top of this file, and the soft cap
        s_RGMCS = scaling * _per_group(q, k.mT)
        if softcap:
            tanh = torch.tanh(s_RGMCS / softcap)
            s_RGMCS = softcap * tanh
        p = (s_RGMCS - lse_RGML[..., queries, None]).exp_().masked_fill_(hidden_CS, 0.0)
        dp = _per_group(do, v.mT)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        if softcap:
            ds = ds * (1 - tanh * tanh)  # derivative of the soft cap
        dq[..., queries, :] = scaling * _per_group(ds, k)
        dk[:, :, keys] += scaling * ds.flatten(2, 3).mT @ q.flatten(2, 3)
        dv[:, :, keys] += p.flatten(2, 3).mT @ do.flatten(2, 3)

    def packed(states: Tensor) -> Tensor:
        """Undo `padded`: `[N, heads, D]` of `[R, G, M, L, D]` or `[R, G, L, D]`."""
        return states.flatten(1, -3).transpose(1, 2).flatten(0, 1)[rows_N]

    return packed(dq), packed(dk), packed(dv)


def sinks_gradient(sinks_H: Tensor, lse_HN: Tensor, output_NHD: Tensor, gradient_NHD: Tensor) -> Tensor:
    """Return the gradient of the sinks `[H]`. Computes sum(p * dp) as sum(output * gradient), without p."""
    wide = lse_HN.dtype
    engine_sinks_H = sinks_H.to(torch.bfloat16).to(wide)  # the engine's sinks are BF16
    share_HN = (engine_sinks_H[:, None] - lse_HN).exp()
    p_dp_NH = (output_NHD.to(wide) * gradient_NHD.to(wide)).sum(-1)  # sum(p * dp)
    return -(share_HN * p_dp_NH.t()).sum(-1).to(sinks_H.dtype)


def _per_group(left_RGMCx: Tensor, right_RGxy: Tensor) -> Tensor:
    """Return `left @ right`, `[R, G, M, C, y]`, by one matrix product for all M query heads of a key head."""
    return (left_RGMCx.flatten(2, 3) @ right_RGxy).unflatten(2, left_RGMCx.shape[2:4])


def _token_places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return each token's sequence, and its position there: int64 `[N]` each. Does not synchronize with the device."""
    starts = starts.long()
    numbers = torch.arange(len(starts) - 1, device=starts.device)
    sequence_N = torch.repeat_interleave(numbers, starts.diff(), output_size=tokens)
    return sequence_N, torch.arange(tokens, device=starts.device) - starts[sequence_N]


class Pages(NamedTuple):
    """Places of packed tokens in a paged KV cache. Each sequence begins at a new page and fills consecutive pages."""

    slots: int  # number of tokens that one page can hold
    count: int  # an upper bound of the pages in use, because the host would have to wait for their exact number
    slots_N: Tensor  # each token's slot, counted over all pages, int64
    table: Tensor  # each sequence's pages, int32 `[R, pages of the longest]`; surplus entries are any valid page


def pages_of(starts: Tensor, longest: int, tokens: int, slots: int) -> Pages:
    """Return pages of `slots` slots for packed sequences with `tokens` tokens in all. `starts`: see `Sequences`."""
    used_R = (starts.diff().long() + slots - 1) // slots  # number of pages of each sequence
    first_R = used_R.cumsum(0) - used_R  # first page of each sequence
    count = tokens // slots + len(used_R)  # each sequence may leave its last page partly empty
    sequence_N, position_N = _token_places(starts, tokens)
    slots_N = first_R[sequence_N] * slots + position_N
    most_pages = -(-longest // slots)  # of one sequence; rounded up
    table = first_R[:, None] + torch.arange(most_pages, device=starts.device)
    table = table.clamp_max_(count - 1).to(torch.int32)
    return Pages(slots=slots, count=count, slots_N=slots_N, table=table)
