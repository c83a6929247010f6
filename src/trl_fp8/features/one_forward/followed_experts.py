"""Routers and experts of a policy that follows an engine: its choice, its gate weights, its fused experts.

    router    logits = engine(x), straight through like those of any linear
              softmax, top-k and normalization: transformers' code at these logits, in FP32, around the engine's choice
    experts   y = engine(x, chosen, gate weights); gradients are those of the policy's own unquantized experts there

The policy takes the engine's choice, so that only the engine breaks a tie. Router replay comes last: the experts that
it chooses get gate weights from the engine's logits.

Shape letters: T tokens, E experts, K experts per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trl_fp8.policy.swapped import HoldsCodes, holding, own_gradient, with_value
from trl_fp8.recipe.names import TRANSFORMERS
from trl_fp8.upstream.patches import substituted

from .followed_linear import StraightThrough, gemm_dtype, tokens_of


BIASES = tuple(f"{name}_bias" for name in TRANSFORMERS.fused)


class FollowedRouter:
    """Mixed into the class of a router that chooses by one top-k. `engine`: see `EngineKernels.router`."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[T, E]`, gate weights `[T, K]`, both FP32, and chosen experts `[T, K]`."""
        if not self.one_forward.on:
            return super().forward(hidden_states)
        logits_TE, weights_TK, chosen_TK = self.engine(tokens_of(hidden_states))

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            # Logits in FP32 keep softmax and gate weights in FP32, and their gradients
            return StraightThrough.apply(lambda _: logits_TE.float(), x, weight, bias, None)

        with substituted(F, "linear", linear), _Routing(chosen_TK.long(), logits_TE.shape):
            followed_TE, own_TK, used_TK = super().forward(hidden_states)
        # Router replay may have replaced the engine's choice, whose gate weights are then of no use
        is_engines_T1 = (used_TK == chosen_TK).all(-1, keepdim=True)
        return followed_TE, with_value(own_TK, torch.where(is_engines_T1, weights_TK, own_TK.detach())), used_TK


class _Routing(TorchFunctionMode):
    """Makes the top-k of a router's own code return the engine's choice, inside the block."""

    def __init__(self, chosen_TK: Tensor, shape: torch.Size):
        super().__init__()
        self.chosen_TK = chosen_TK
        self.shape = shape  # of the logits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        # The router asks for the top k of its scores and gets that of a ranking: K, K - 1, ..., 1 for the engine's
        # choice, 0 for other experts. `func` ranks it, because router replay may have wrapped `func`
        rank_K = torch.arange(self.chosen_TK.shape[1], 0, -1, device=self.chosen_TK.device).float()
        ranking_TE = torch.zeros(self.shape, device=self.chosen_TK.device)
        ranking_TE.scatter_(-1, self.chosen_TK, rank_K.expand(self.chosen_TK.shape))
        indices_TK = func(ranking_TE, *args[1:], **(kwargs or {})).indices
        return torch.return_types.topk((args[0].gather(-1, indices_TK), indices_TK))


class FollowedExperts:
    """Mixed into the class of the experts of a layer. `engine`: see `EngineKernels.experts`."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        inputs, dtype = (hidden_states, top_k_index, top_k_weights), gemm_dtype(hidden_states.device)
        if isinstance(self, HoldsCodes):
            return own_gradient(self._value, self.dequantized, *inputs, dtype=dtype)
        # Not `_parameters`: adapters of parameters replace them by sums while they run
        weights = [getattr(self, name) for name in self._names]
        return own_gradient(self._value, self._own, *inputs, *weights, dtype=dtype)

    @property
    def _names(self) -> list[str]:
        """Return the names of its weights, and of their biases if it has any."""
        return [name for name in (*TRANSFORMERS.fused, *BIASES) if hasattr(self, name)]

    def _value(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *weights: Tensor) -> Tensor:
        return self.engine(tokens_of(hidden_states), top_k_index, top_k_weights)

    def _own(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *weights: Tensor) -> Tensor:
        with holding(self, dict(zip(self._names, weights, strict=True))):
            return self.before.forward(self, hidden_states, top_k_index, top_k_weights)
