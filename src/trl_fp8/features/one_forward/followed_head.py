"""TRL's fused output head with the engine's log-probs: the engine's logits, and its sampler's log-softmax in FP32.

TRL multiplies hidden states by the head's weight, reduces the logits in chunks, and recomputes them in the backward.
Here the forward asks the engine for the logits; the backward is TRL's, with the policy's own weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from trl_fp8.policy.swapped import TOKENS

from .followed_linear import tokens_of
from .one_forward import OneForward


OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # in the order of TRL's outputs


def engine_logits(forward: OneForward, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function of hidden states `[T, K]` that returns the engine's logits `[T, V]`; see `swapped.Logits`.

    `weight` and `bias` are not read: the engine multiplies by its own copy.
    """
    return lambda hidden: forward.kernels.logits(tokens_of(hidden))


def followed_head(one_forward: OneForward, compare: Callable | None = None) -> type[ChunkedLogProbFunction]:
    """Return a `ChunkedLogProbFunction` of TRL 1.16 whose forward is the engine's.

    `compare(hidden, weight, bias, logit_scale, softcap, logits)` is called with the engine's logits, to compare
    the policy's own with them.
    """

    class FollowedHead(ChunkedLogProbFunction):
        @staticmethod
        def forward(
            ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
        ) -> tuple[Tensor | None, ...]:
            """Return log-probs of the targets and `OPTIONAL`, FP32 `[T]` each, None for what `outputs` does not name.

            hidden `[T, K]`, weight `[V, K]`, targets `[T]`.
            """
            ctx.set_materialize_grads(False)  # an entropy that is only logged gets no gradient
            logits = engine_logits(one_forward, weight, bias)
            if compare is not None:
                compare(hidden, weight, bias, logit_scale, final_logit_softcapping, logits(hidden))
            found = [
                _scored(logits(rows).float().div_(temperature), of_rows, outputs)
                for rows, of_rows in zip(hidden.split(TOKENS), targets.split(TOKENS), strict=True)
            ]
            named = {name: torch.cat([each[name] for each in found]) for name in found[0]}
            log_z = named.pop("log_z")
            # Without an entropy any tensor fills its slot: the backward reads that only for a gradient of the entropy
            ctx.save_for_backward(hidden, weight, bias, targets, log_z, named.get("entropy", log_z))
            # TRL's backward recomputes the logits, in FP32 on a CPU. The engine's are in BF16, and `log_z` is theirs:
            # only with logits in BF16 do probabilities sum to 1
            ctx.compute_dtype = torch.bfloat16
            ctx.chunk_size = chunk_size
            ctx.kernel_args = {
                "logit_scale": logit_scale,
                "softcap": final_logit_softcapping or 1.0,
                "inv_t": 1 / temperature,
                "HAS_SOFTCAP": final_logit_softcapping is not None,
            }
            ctx.mark_non_differentiable(*(named[name] for name in OPTIONAL[1:] if name in named))
            return named["log_probs"], *(named.get(name) for name in OPTIONAL)

    return FollowedHead


def _scored(logits: Tensor, targets: Tensor, outputs: tuple[str, ...]) -> dict[str, Tensor]:
    """Return log-probs of the targets, normalizers `log_z`, and those of `OPTIONAL` that `outputs` names.

    From FP32 logits `[T, V]`.
    """
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    found = {"log_probs": log_probs, "log_z": logits.gather(-1, targets[:, None])[:, 0] - log_probs}
    if "entropy" in outputs:
        found["entropy"] = -(log_p.exp() * log_p).sum(-1)
    if "log_sum_sq_probs" in outputs:
        found["log_sum_sq_probs"] = (2 * log_p).logsumexp(-1)
    if "mean_logits" in outputs:
        found["mean_logits"] = logits.mean(-1)
    if "is_top1" in outputs:
        found["is_top1"] = logits.argmax(-1) == targets
    return found
