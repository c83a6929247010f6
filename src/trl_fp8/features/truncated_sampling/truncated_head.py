"""A substitute for TRL's fused output head that normalizes over the tokens that survived truncated sampling.

vLLM removes the tokens that top-k, top-p and min-p drop, and normalizes over the rest. This head normalizes over the
tokens that survived in the engine. If the trainer applied top-k, top-p and min-p to its slightly different logits, it
would drop other tokens at the border, perhaps the sampled token. Dropped tokens get no gradient, so the backward needs
only the survivors' log-probs.

truncation.py builds `Rows`, the survivors of all tokens of a pass. TRL calls the head of `truncated_head` with chunks
of these tokens, and `TruncatedHead` takes each chunk's survivors from `Rows`. `_tiles` splits the sampled tokens of a
chunk further, so that only the logits of one tile are in memory.

Shape letters: N tokens that TRL's head gets, R of them sampled, E survivors of these R tokens together, T tokens of a
tile, K hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE, _addmm_fp32
from trl.trainer.utils import maybe_gather_lm_head_ctx

from trl_fp8.policy.swapped import TOKENS_AT_A_TIME, Logits


ALIGNED = 8  # columns of padding: a GEMM in 16 bits is fast if rows begin at multiples of 16 bytes


@dataclass
class Rows:
    """Queue of the survivors of the tokens that TRL will pass to its output head, chunk by chunk, in this order."""

    counts_N: Tensor  # int64, on the device: number of survivors of each token; 0: not sampled, as in prompts
    ids_E: Tensor  # int64: token ids of the survivors, token after token

    def take(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Remove and return the counts and ids of the next `tokens` tokens."""
        if tokens > len(self.counts_N):
            raise RuntimeError(
                f"TRL's output head scores {tokens} tokens, but only {len(self.counts_N)} are left whose survivors "
                "are known (on CPU TRL 1.16 scores all tokens of a batch, elsewhere only those of completions)."
            )
        counts_N = self.counts_N[:tokens]
        self.counts_N = self.counts_N[tokens:]
        survivors = int(counts_N.sum())
        ids_E = self.ids_E[:survivors]
        self.ids_E = self.ids_E[survivors:]
        return counts_N, ids_E


def truncated_head(survivors: Rows, other_logits: Logits | None = None) -> SimpleNamespace:
    """Return a substitute for TRL 1.16's `ChunkedLogProbFunction` that normalizes over `survivors`.

    `other_logits` returns the function that computes logits (`Feature.logits`). If it is None, logits are products of
    hidden states with the head's own weight.
    """
    return SimpleNamespace(apply=partial(TruncatedHead.apply, survivors, other_logits))


class TruncatedHead(torch.autograd.Function):
    """Log-probs and entropies, normalized over survivors. They are zero for tokens that were not sampled."""

    @staticmethod
    def forward(
        ctx, survivors, other_logits, hidden, weight, bias, targets, temperature, chunk_size, cap, scale, outputs
    ) -> tuple[Tensor | None, ...]:
        """Map hidden `[N, K]`, weight `[V, K]`, targets `[N]` to log-probs and, if in `outputs`, entropy, FP32 `[N]`.

        Logits are multiplied by `scale`, and soft-capped at `cap` unless it is None.
        """
        assert set(outputs) <= {"log_probs", "entropy"}, outputs  # GRPO uses no others
        ctx.set_materialize_grads(False)  # an entropy that is only logged gets no gradient, instead of zeros
        device = hidden.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
        if other_logits is None:
            logits = _own_logits(weight.to(dtype), bias, scale, cap)
        else:
            logits = other_logits(weight, bias)
            dtype = torch.bfloat16  # dtype of the engine's logits, so also of the backward's GEMMs
        counts_N, ids_E = survivors.take(len(hidden))
        sampled_R = counts_N.nonzero()[:, 0]
        counts_R = counts_N[sampled_R]
        log_probs = torch.zeros(len(hidden), device=device)
        entropy = torch.zeros_like(log_probs)
        log_ps = []  # log-prob of each survivor
        slopes = []  # derivative of each survivor's capped logit with respect to the logit before the cap
        for start, rows, counts, ids in _tiles(counts_R, ids_E, TOKENS_AT_A_TIME):
            # The logits of survivors are at `[rows, ids]`
            tokens = sampled_R[start : start + len(counts)]
            logits_TV = logits(hidden[tokens]).float()
            # Dropped tokens get a logit of -inf, as in vLLM's sampler, so softmax normalizes over the others
            survivors_TV = torch.full_like(logits_TV, -torch.inf)
            survivors_TV[rows, ids] = logits_TV[rows, ids] / temperature
            log_p = survivors_TV.log_softmax(-1)
            log_probs[tokens] = log_p.gather(-1, targets[tokens, None])[:, 0]
            entropy[tokens] = torch.special.entr(log_p.exp()).sum(-1)
            log_ps.append(log_p[rows, ids])
            if cap is not None:  # d (cap tanh(x / cap)) / dx = 1 - tanh(x / cap)^2, and logits = cap tanh(x / cap)
                slopes.append(1 - (logits_TV[rows, ids] / cap).square())
        log_p_E = torch.cat(log_ps) if log_ps else log_probs[:0]
        slope_E = torch.cat(slopes) if slopes else None
        ctx.save_for_backward(hidden, weight, bias, targets, sampled_R, counts_R, ids_E, log_p_E, slope_E, entropy)
        ctx.dtype = dtype
        ctx.chunk_size = chunk_size
        ctx.slope = scale / temperature
        return log_probs, entropy if "entropy" in outputs else None, None, None, None

    @staticmethod
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sampled_R, counts_R, ids_E, log_p_E, slope_E, entropy = ctx.saved_tensors
        token_E = sampled_R.repeat_interleave(counts_R)  # the token that each survivor belongs to
        hidden_RK = hidden[sampled_R]
        p_E = log_p_E.exp()
        grad_E = torch.zeros_like(log_p_E)
        # Derivatives with respect to a survivor's logit, with H for the entropy:
        #     d log p_target = is_target - p        dH = - p (log p + H)
        if grad_log_probs is not None:
            is_target_E = (ids_E == targets[token_E]).float()
            grad_E += grad_log_probs[token_E] * (is_target_E - p_E)
        if grad_entropy is not None:
            grad_E -= grad_entropy[token_E] * p_E * (log_p_E + entropy[token_E])
        grad_E *= ctx.slope if slope_E is None else ctx.slope * slope_E
        grad_hidden = grad_weight = grad_bias = None
        _, _, needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        with maybe_gather_lm_head_ctx(weight, bias):
            # In FP32, because gradients are sums over many tiles
            if needs_hidden:
                grad_hidden = torch.zeros(hidden_RK.shape, device=hidden_RK.device)
            if needs_weight:
                grad_weight = torch.zeros(weight.shape, device=weight.device)
            if needs_bias:
                grad_bias = torch.zeros(bias.shape, device=bias.device)
            # A tile holds the gradients of the loss with respect to logits, `[tokens, part of V]`. The gradients are
            # zero except at survivors
            numbers = torch.arange(len(ids_E), device=ids_E.device)  # indices of survivors in E
            for first, rows, counts, in_tile in _tiles(counts_R, numbers, TOKEN_CHUNK_SIZE):
                tokens = slice(first, first + len(counts))
                hidden_TK = hidden_RK[tokens].to(ctx.dtype)
                for start in range(0, len(weight), ctx.chunk_size):
                    words = slice(start, start + ctx.chunk_size)
                    part = weight[words].to(ctx.dtype)
                    column = ids_E[in_tile] - start
                    inside = (column >= 0) & (column < len(part))
                    tile = part.new_zeros(len(counts), len(part) + ALIGNED)
                    # Survivors in another part of the vocabulary are written, as zeros, to a column that is cut off
                    tile[rows, column.where(inside, len(part))] = grad_E[in_tile].where(inside, 0).to(ctx.dtype)
                    tile = tile[:, : len(part)]
                    if grad_hidden is not None:
                        _addmm_fp32(grad_hidden[tokens], tile, part)
                    if grad_weight is not None:
                        _addmm_fp32(grad_weight[words], tile.t(), hidden_TK)
                    if grad_bias is not None:
                        grad_bias[words] += tile.sum(0, dtype=torch.float32)
        if grad_hidden is not None:
            grad_hidden_RK = grad_hidden.to(hidden.dtype)
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, sampled_R, grad_hidden_RK)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return None, None, grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _own_logits(weight: Tensor, bias: Tensor | None, scale: float, cap: float | None) -> Callable[[Tensor], Tensor]:
    """Return a function from hidden `[T, K]` to logits `[T, V]`, as in TRL's head, with a GEMM in `weight`'s dtype."""

    def logits(hidden: Tensor) -> Tensor:
        own_bias = None if bias is None else bias.to(weight.dtype)
        projected = F.linear(hidden.to(weight.dtype), weight, own_bias).float()
        projected *= scale
        return projected if cap is None else cap * torch.tanh(projected / cap)

    return logits


def _tiles(counts_R: Tensor, values_E: Tensor, tokens: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Split R tokens, and the values of their survivors, into tiles of `tokens` tokens.

    Yield for each tile: the index of the tile's first token; for each survivor, the row of its token in the tile; for
    each token, the number of its survivors; and the survivors' values.
    """
    if not len(counts_R):
        return
    tiles = counts_R.split(tokens)
    sizes = torch.stack([counts.sum() for counts in tiles]).tolist()  # number of survivors of each tile
    start = 0
    for counts, values in zip(tiles, values_E.split(sizes), strict=True):
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        yield start, rows, counts, values
        start += len(counts)
