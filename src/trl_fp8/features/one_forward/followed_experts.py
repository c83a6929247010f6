"""Routers and experts of a policy that follows an engine: values are the engine's, gradients the policy's own.

    router    logits = engine(x), with the straight-through gradient of a linear layer. Softmax, top-k and
              normalization run transformers' code on these logits, in FP32, but top-k returns the engine's choice
    experts   y = engine(x, chosen, gate weights), with the gradients of the policy's own unquantized experts

The policy takes the engine's choice of experts, so only the engine breaks ties. Router replay may then replace the
choice; the experts that it chooses get gate weights that are computed from the engine's logits.

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
    """Mixed into the class of a router that calls top-k once. `engine`: see `EngineKernels.router`."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[T, E]`, gate weights `[T, K]`, both FP32, and chosen experts `[T, K]`."""
        if not self.one_forward.on:
            return super().forward(hidden_states)
        logits_TE, weights_TK, chosen_TK = self.engine(tokens_of(hidden_states))

        def engine_logits(_: Tensor) -> Tensor:
            # From FP32 logits the softmax, the gate weights and their gradients are FP32, too
            return logits_TE.float()

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            fp8_layer = None  # the backward stays unquantized
            return StraightThrough.apply(engine_logits, x, weight, bias, fp8_layer)

        with substituted(F, "linear", linear), _EnginesChoice(chosen_TK.long(), logits_TE.shape):
            followed_TE, own_TK, used_TK = super().forward(hidden_states)
        # The engine's gate weights belong to the engine's choice. For tokens with other experts, which router replay
        # chose, keep transformers' own gate weights
        is_engines_T1 = (used_TK == chosen_TK).all(-1, keepdim=True)
        value_TK = torch.where(is_engines_T1, weights_TK, own_TK.detach())
        return followed_TE, with_value(own_TK, value_TK), used_TK


class _EnginesChoice(TorchFunctionMode):
    """Makes the top-k in transformers' code of a router return the engine's choice, inside the block."""

    def __init__(self, chosen_TK: Tensor, shape: torch.Size):
        super().__init__()
        self.chosen_TK = chosen_TK
        self.shape = shape  # of the logits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        # In place of the router's scores pass a ranking whose top k is the engine's choice: K, K - 1, ..., 1 for the
        # chosen experts, 0 for the others. Call `func` nevertheless, because router replay may have wrapped it
        rank_K = torch.arange(self.chosen_TK.shape[1], 0, -1, device=self.chosen_TK.device).float()
        ranking_TE = torch.zeros(self.shape, device=self.chosen_TK.device)
        ranking_TE.scatter_(-1, self.chosen_TK, rank_K.expand(self.chosen_TK.shape))
        scores_TE, *options = args
        indices_TK = func(ranking_TE, *options, **(kwargs or {})).indices
        return torch.return_types.topk((scores_TE.gather(-1, indices_TK), indices_TK))


class FollowedExperts:
    """Mixed into the class of the experts of a layer. `engine`: see `EngineKernels.experts`."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        inputs = hidden_states, top_k_index, top_k_weights
        dtype = gemm_dtype(hidden_states.device)
        if isinstance(self, HoldsCodes):  # with a shared FP8 base the backward dequantizes the engine's codes
            return own_gradient(self._engine_value, self.dequantized, *inputs, dtype=dtype)
        # Read attributes, not `_parameters`: while PEFT's `ParamWrapper` runs, a weight with an adapter is
        # parametrized, and only the attribute is base + adapter
        weights = [getattr(self, name) for name in self._weight_names]
        return own_gradient(self._engine_value, self._policy_value, *inputs, *weights, dtype=dtype)

    @property
    def _weight_names(self) -> list[str]:
        """Return the names of the experts' weights, and of their biases if there are any."""
        return [name for name in (*TRANSFORMERS.fused, *BIASES) if hasattr(self, name)]

    def _engine_value(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Tensor) -> Tensor:
        return self.engine(tokens_of(hidden_states), top_k_index, top_k_weights)

    def _policy_value(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *weights: Tensor
    ) -> Tensor:
        with holding(self, dict(zip(self._weight_names, weights, strict=True))):
            return super().forward(hidden_states, top_k_index, top_k_weights)
