"""The output head of a policy: the one place where log-probs are made, by TRL's fused function or by another.

TRL's head never makes the logits of all tokens at once: it projects and folds them tile by tile. What scores in its
place does the same, `TOKENS` at a time, and may take its logits from elsewhere (`Feature.logits`).

Shape letters: T tokens, K hidden size, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import trl.trainer.utils as trl_utils
from torch import Tensor

from trl_fp8.upstream.patches import substituted


TOKENS = 256  # whose logits over the whole vocabulary are held at a time

# The policy's weight `[V, K]` and bias `[V]` or None -> what makes logits `[T, V]` of hidden states `[T, K]`
Logits = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]


def scored_by(head: object) -> AbstractContextManager[None]:
    """Inside the block `head` scores, in the place of TRL's function, of which `apply` is all that is called."""
    return substituted(trl_utils, "_ChunkedLogProbFunction", head)
