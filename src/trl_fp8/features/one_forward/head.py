"""TRL's fused output head with the engine's log-probs: its logits, in FP32 what its sampler makes of them.

TRL reads the head's weight, projects and folds tile by tile, and makes all of it again in the backward. Here the
forward asks the engine for the logits; the backward is TRL's, of the policy's own weight.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from trl_fp8.features.one_forward.modules.followed_linear import tokens_of
from trl_fp8.upstream.patches import substituted

from .one_forward import OneForward


TOKENS = 256  # whose logits over the whole vocabulary are held at a time


def scored_by(head: type[torch.autograd.Function]) -> AbstractContextManager[None]:
    """Inside the block `head` scores, in the place of TRL's `ChunkedLogProbFunction`."""
    return substituted(trl_utils, "_ChunkedLogProbFunction", head)


def engine_logits(flow: OneForward, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """hidden `[T, K]` -> the engine's logits `[T, V]`, of its own weight or of the policy's."""
    if flow.shares:
        return lambda hidden: flow.kernels.logits(tokens_of(hidden))
    own = weight.to(torch.bfloat16), None if bias is None else bias.to(torch.bfloat16)
    return lambda hidden: flow.kernels.head(tokens_of(hidden), *own)


def engine_head(flow: OneForward) -> type[ChunkedLogProbFunction]:
    """`ChunkedLogProbFunction` of TRL 1.16 whose forward is the engine's."""

    class EngineHead(ChunkedLogProbFunction):
        @staticmethod
        def forward(
            ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
        ) -> tuple[Tensor | None, ...]:
            """hidden `[T, K]`, weight `[V, K]`, targets `[T]` -> what `outputs` names, FP32 `[T]` each, else None."""
            ctx.set_materialize_grads(False)  # of an entropy that is only logged
            logits, found = engine_logits(flow, weight, bias), []
            for rows, wanted in zip(hidden.split(TOKENS), targets.split(TOKENS), strict=True):
                found.append(_scored(logits(rows).float().div_(temperature), wanted, outputs))
            log_probs, log_z, *others = (torch.cat(parts) for parts in zip(*found, strict=True))
            named = dict(zip((name for name in OPTIONAL if name in outputs), others, strict=True))
            entropy = named.get("entropy")
            ctx.save_for_backward(hidden, weight, bias, targets, log_z, log_z if entropy is None else entropy)
            # On a CPU, too: it makes the engine's rounded logits again, which the normalizer goes with
            ctx.compute_dtype, ctx.chunk_size = torch.bfloat16, chunk_size
            ctx.kernel_args = {
                "logit_scale": logit_scale,
                "softcap": final_logit_softcapping or 1.0,
                "inv_t": 1 / temperature,
                "HAS_SOFTCAP": final_logit_softcapping is not None,
            }
            ctx.mark_non_differentiable(*(value for name, value in named.items() if name != "entropy"))
            return log_probs, *(named.get(name) for name in OPTIONAL)

    return EngineHead


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
