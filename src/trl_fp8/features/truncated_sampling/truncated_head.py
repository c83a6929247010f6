"""TRL's fused output head over what truncated sampling left: log-probs of the distribution that was sampled.

vLLM removes the tokens that top-k, top-p and min-p drop and normalizes over the rest. This head does the same with the
engine's choice of tokens: the trainer's own choice, from slightly different logits, would drop others at the border,
perhaps the sampled one. Only survivors get a gradient, so their log-probs are all that the backward needs.

Shape letters: N tokens that TRL's head gets, R of them sampled, E survivors of these, K hidden size, V vocabulary.
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

from trl_fp8.policy.swapped import TOKENS, Logits


ALIGNED = 8  # columns; a GEMM in 16 bits wants rows that begin at 16 bytes


@dataclass
class Rows:
    """Survivors of the tokens that TRL's head is going to get, in its order, chunk by chunk."""

    counts_N: Tensor  # int64, on the device; 0: not sampled, as in prompts
    ids_E: Tensor  # int64

    def take(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Take counts and ids of the next `tokens`."""
        if tokens > len(self.counts_N):
            raise RuntimeError(
                f"TRL's output head scores {tokens} tokens, and {len(self.counts_N)} are left whose survivors are "
                "known (TRL 1.16 scores all of a batch on CPU, and the completions' elsewhere)."
            )
        counts_N = self.counts_N[:tokens]
        self.counts_N = self.counts_N[tokens:]
        survivors = int(counts_N.sum())
        ids_E = self.ids_E[:survivors]
        self.ids_E = self.ids_E[survivors:]
        return counts_N, ids_E


def truncated_head(survivors: Rows, elsewhere: Logits | None = None) -> SimpleNamespace:
    """Return a stand-in for TRL 1.16's `ChunkedLogProbFunction` that normalizes over `survivors`. `elsewhere` makes
    the logits if the policy's own weight does not.
    """
    return SimpleNamespace(apply=partial(TruncatedHead.apply, survivors, elsewhere))


class TruncatedHead(torch.autograd.Function):
    """Log-probs and entropies of the survivors, renormalized, and zero for tokens that were not sampled."""

    @staticmethod
    def forward(
        ctx, survivors, elsewhere, hidden, weight, bias, targets, temperature, chunk_size, cap, scale, outputs
    ) -> tuple[Tensor | None, ...]:
        """Map hidden `[N, K]`, weight `[V, K]`, targets `[N]` to log-probs and, if wanted, entropy, FP32 `[N]`.

        Logits are multiplied by `scale`, and soft-capped at `cap` unless that is None.
        """
        assert set(outputs) <= {"log_probs", "entropy"}, outputs  # all that GRPO asks for
        ctx.set_materialize_grads(False)  # of an entropy that is only logged
        device = hidden.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
        if elsewhere is None:
            logits = _own_logits(weight.to(dtype), bias, scale, cap)
        else:
            logits = elsewhere(weight, bias)
            dtype = torch.bfloat16
        counts_N, ids_E = survivors.take(len(hidden))
        sampled_R = counts_N.nonzero()[:, 0]
        counts_R = counts_N[sampled_R]
        log_probs, entropy = (torch.zeros(len(hidden), device=device) for _ in range(2))
        log_ps, slopes = [], []  # of each survivor: log-prob, and how fast its logit follows the projection
        for start, rows, counts, ids in _tiles(counts_R, ids_E, TOKENS):
            tokens = sampled_R[start : start + len(counts)]
            all_TV = logits(hidden[tokens]).float()
            # What was dropped is -inf, as in vLLM's sampler; softmax then normalizes over what is left
            left_TV = torch.full_like(all_TV, -torch.inf)
            left_TV[rows, ids] = all_TV[rows, ids] / temperature
            log_p = left_TV.log_softmax(-1)
            log_probs[tokens] = log_p.gather(-1, targets[tokens, None])[:, 0]
            entropy[tokens] = torch.special.entr(log_p.exp()).sum(-1)
            log_ps.append(log_p[rows, ids])
            if cap is not None:  # d (cap * tanh(x / cap)) / dx = 1 - tanh(x / cap)^2
                slopes.append(1 - (all_TV[rows, ids] / cap).square())
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
        token_E = sampled_R.repeat_interleave(counts_R)
        hidden_RK = hidden[sampled_R]
        p_E = log_p_E.exp()
        grad_E = torch.zeros_like(log_p_E)
        # Of a survivor's logit: d log p_target = [it is the target] - p, and dH = - p (log p + H)
        if grad_log_probs is not None:
            grad_E += grad_log_probs[token_E] * ((ids_E == targets[token_E]).float() - p_E)
        if grad_entropy is not None:
            grad_E -= grad_entropy[token_E] * p_E * (log_p_E + entropy[token_E])
        grad_E *= ctx.slope if slope_E is None else ctx.slope * slope_E
        needed = ctx.needs_input_grad[2:5]
        with maybe_gather_lm_head_ctx(weight, bias):
            grads = [  # in FP32: added up over many tiles
                torch.zeros(x.shape, device=x.device) if x is not None and need else None
                for x, need in zip((hidden_RK, weight, bias), needed, strict=True)
            ]
            grad_hidden, grad_weight, grad_bias = grads
            # Tile by tile, over tokens and vocabulary: GEMMs with the survivors in their places and zeros elsewhere
            places = torch.arange(len(ids_E), device=ids_E.device)
            for first, rows, counts, here in _tiles(counts_R, places, TOKEN_CHUNK_SIZE):
                tokens = slice(first, first + len(counts))
                hidden_TK = hidden_RK[tokens].to(ctx.dtype)
                for start in range(0, len(weight), ctx.chunk_size):
                    words = slice(start, start + ctx.chunk_size)
                    part = weight[words].to(ctx.dtype)
                    column = ids_E[here] - start
                    inside = (column >= 0) & (column < len(part))
                    tile = part.new_zeros(len(counts), len(part) + ALIGNED)
                    # survivors of another part of the vocabulary: zeros, in a column that is cut off
                    tile[rows, column.where(inside, len(part))] = grad_E[here].where(inside, 0).to(ctx.dtype)
                    tile = tile[:, : len(part)]
                    if grad_hidden is not None:
                        _addmm_fp32(grad_hidden[tokens], tile, part)
                    if grad_weight is not None:
                        _addmm_fp32(grad_weight[words], tile.t(), hidden_TK)
                    if grad_bias is not None:
                        grad_bias[words] += tile.sum(0, dtype=torch.float32)
        if grads[0] is not None:
            grads[0] = torch.zeros(hidden.shape, device=hidden.device).index_copy_(0, sampled_R, grads[0])
        of_inputs = zip(grads, (hidden, weight, bias), strict=True)
        return None, None, *(None if grad is None else grad.to(x.dtype) for grad, x in of_inputs), *([None] * 6)


def _own_logits(weight: Tensor, bias: Tensor | None, scale: float, cap: float | None) -> Callable[[Tensor], Tensor]:
    """Return the function hidden `[T, K]` -> logits `[T, V]`, as in TRL's head, in the dtype of `weight`."""

    def logits(hidden: Tensor) -> Tensor:
        projected = F.linear(hidden.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).float()
        projected *= scale
        return projected if cap is None else cap * torch.tanh(projected / cap)

    return logits


def _tiles(counts_R: Tensor, values_E: Tensor, tokens: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield (first token, row within the tile of each survivor, counts, values) for tiles of `tokens`."""
    counts = counts_R.split(tokens) if len(counts_R) else ()
    sizes = torch.stack([each.sum() for each in counts]).tolist() if counts else []
    for number, (each, values) in enumerate(zip(counts, values_E.split(sizes), strict=True)):
        rows = torch.arange(len(each), device=each.device).repeat_interleave(each)
        yield number * tokens, rows, each, values
