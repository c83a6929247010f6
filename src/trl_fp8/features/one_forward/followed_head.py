"""TRL's fused output head with the engine's log-probs: its logits, in FP32 what its sampler makes of them.

TRL reads the head's weight, projects and folds tile by tile, and makes all of it again in the backward. Here the
forward asks the engine for the logits; the backward is TRL's, of the policy's own weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from trl_fp8.policy.head import TOKENS

from .followed_linear import tokens_of
from .one_forward import OneForward


def engine_logits(forward: OneForward, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """hidden `[T, K]` -> the engine's logits `[T, V]`, of its own weight or of the policy's."""
    return lambda hidden: forward.kernels.logits(tokens_of(hidden))


def followed_head(one_forward: OneForward) -> type[ChunkedLogProbFunction]:
    """`ChunkedLogProbFunction` of TRL 1.16 whose forward is the engine's."""

    class FollowedHead(ChunkedLogProbFunction):
        @staticmethod
        def forward(
            ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
        ) -> tuple[Tensor | None, ...]:
            """hidden `[T, K]`, weight `[V, K]`, targets `[T]` -> what `outputs` names, FP32 `[T]` each, else None."""
            ctx.set_materialize_grads(False)  # of an entropy that is only logged
            logits, found = engine_logits(one_forward, weight, bias), []
            for rows, wanted in zip(hidden.split(TOKENS), targets.split(TOKENS), strict=True):
                found.append(_scored(logits(rows).float().div_(temperature), wanted, outputs))
            log_probs, log_z, *others = (torch.cat(parts) for parts in zip(*found, strict=True))
            named = dict(zip((name for name in OPTIONAL if name in outputs), others, strict=True))
            entropy = named.get("entropy")
            ctx.save_for_backward(hidden, weight, bias, targets, log_z, log_z if entropy is None else entropy)
            # TRL's backward computes the logits anew, in FP32 on a CPU. In BF16 they are the engine's, rounded as the
            # forward saw them, and only with those does the saved normalizer give probabilities that sum to 1
            ctx.compute_dtype, ctx.chunk_size = torch.bfloat16, chunk_size
            ctx.kernel_args = {
                "logit_scale": logit_scale,
                "softcap": final_logit_softcapping or 1.0,
                "inv_t": 1 / temperature,
                "HAS_SOFTCAP": final_logit_softcapping is not None,
            }
            ctx.mark_non_differentiable(*(value for name, value in named.items() if name != "entropy"))
            return log_probs, *(named.get(name) for name in OPTIONAL)

    return FollowedHead


OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # in the order of TRL's outputs


def _scored(logits: Tensor, targets: Tensor, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Log-probs of the targets and normalizers, and what else is wanted, of FP32 logits `[T, V]`."""
    log_p = logits.log_softmax(-1)
    chosen, target = (values.gather(-1, targets[:, None])[:, 0] for values in (log_p, logits))
    made = {
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": lambda: (2 * log_p).logsumexp(-1),
        "mean_logits": lambda: logits.mean(-1),
        "is_top1": lambda: logits.argmax(-1) == targets,
    }
    return chosen, target - chosen, *(made[name]() for name in OPTIONAL if name in outputs)
