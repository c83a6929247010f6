"""A replacement of TRL's fused output head that computes log-probs as the engine's sampler does.

TRL's head multiplies hidden states by the head's weight, reduces the logits in chunks, and computes them again in the
backward. Here the forward takes the engine's logits and applies log-softmax in FP32, like the sampler. The backward is
TRL's, which computes logits from the policy's own weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from trl_fp8.policy.swapped import TOKENS_AT_A_TIME

from .followed_linear import tokens_of
from .one_forward import OneForward


OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # in the order of TRL's outputs


def engine_logits(forward: OneForward, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function of hidden states `[T, K]` that returns the engine's logits `[T, V]`; see `swapped.Logits`.

    `weight` and `bias` are ignored, because the engine multiplies by its own copy of the weight.
    """
    return lambda hidden: forward.kernels.logits(tokens_of(hidden))


def followed_head(one_forward: OneForward, compare: Callable | None = None) -> type[ChunkedLogProbFunction]:
    """Return a subclass of TRL 1.16's `ChunkedLogProbFunction` whose forward uses the engine's logits.

    Unless `compare` is None, each forward calls `compare(hidden, weight, bias, logit_scale, softcap, logits)` with
    these logits, to compare them with the logits of the policy's own head.
    """

    class FollowedHead(ChunkedLogProbFunction):
        @staticmethod
        def forward(
            ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
        ) -> tuple[Tensor | None, ...]:
            """Return log-probs of the targets, then the values in `OPTIONAL`, None for each that `outputs` lacks.

            All are `[T]`: bool for `is_top1`, else FP32. hidden is `[T, K]`, weight `[V, K]`, targets `[T]`.
            """
            ctx.set_materialize_grads(False)  # so an entropy that is only logged gets None as its gradient
            logits = engine_logits(one_forward, weight, bias)
            if compare is not None:
                compare(hidden, weight, bias, logit_scale, final_logit_softcapping, logits(hidden))
            tiles = []
            for start in range(0, max(len(hidden), 1), TOKENS_AT_A_TIME):  # one empty tile if there are no tokens
                rows = slice(start, start + TOKENS_AT_A_TIME)
                scaled_logits = logits(hidden[rows]).float().div_(temperature)
                tiles.append(_scored(scaled_logits, targets[rows], outputs))
            named = {name: torch.cat([tile[name] for tile in tiles]) for name in tiles[0]}
            log_z = named.pop("log_z")
            # TRL's backward reads the last tensor, the entropy, only to compute the entropy's gradient. If no entropy
            # was computed, `log_z` fills its place
            ctx.save_for_backward(hidden, weight, bias, targets, log_z, named.get("entropy", log_z))
            # TRL's backward recomputes the logits, by default in FP32 on a CPU. The engine's logits, from which
            # `log_z` comes, are BF16. Recomputed in FP32, probabilities would not sum to 1
            ctx.compute_dtype = torch.bfloat16
            ctx.chunk_size = chunk_size
            ctx.kernel_args = {
                "logit_scale": logit_scale,
                "softcap": final_logit_softcapping or 1.0,
                "inv_t": 1 / temperature,
                "HAS_SOFTCAP": final_logit_softcapping is not None,
            }
            # Only log-probs and the entropy, OPTIONAL[0], have gradients
            ctx.mark_non_differentiable(*(named[name] for name in OPTIONAL[1:] if name in named))
            return named["log_probs"], *(named.get(name) for name in OPTIONAL)

    return FollowedHead


def _scored(logits: Tensor, targets: Tensor, outputs: tuple[str, ...]) -> dict[str, Tensor]:
    """Return tensors `[T]` by name: `log_probs` of the targets, the normalizers `log_z`, and the names in `outputs`.

    `logits` are FP32 `[T, V]`. `outputs` are some of `OPTIONAL`.
    """
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    target_logits = logits.gather(-1, targets[:, None])[:, 0]
    scored = {"log_probs": log_probs, "log_z": target_logits - log_probs}
    if "entropy" in outputs:
        scored["entropy"] = -(log_p.exp() * log_p).sum(-1)
    if "log_sum_sq_probs" in outputs:
        scored["log_sum_sq_probs"] = (2 * log_p).logsumexp(-1)
    if "mean_logits" in outputs:
        scored["mean_logits"] = logits.mean(-1)
    if "is_top1" in outputs:
        scored["is_top1"] = logits.argmax(-1) == targets
    return scored
