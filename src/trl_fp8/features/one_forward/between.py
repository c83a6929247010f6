"""Modules between the linear layers of a policy that follows an engine: embeddings, norms, MLPs, rotary embeddings.

FP8 magnifies small differences. If activations are off by one BF16 step (1/128 between 1 and 2), they cross a rounding
boundary of e4m3 (steps of 1/8) so often that the error after the next linear layer is as large as that of quantization
itself, and each layer adds to it. So norms, activation functions and rotary embeddings call the engine's modules.
Embedding lookups, residual sums and other single products or sums need no kernel of the engine. Each of these is
rounded once, so its bits are the same anywhere, if it is computed in BF16 and in the engine's order.

Each class is mixed into the class of a module (policy/swapped.py). The module then has two more attributes:
`one_forward.on` says whether the module follows the engine now, and `engine` is the engine's function. `_engine_value`
computes the output of the forward. `_policy_value` computes the policy's formula, which gives the gradients.

Shape letters: T tokens, N channels, B sequences, S positions, H query heads, G key heads, D head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trl_fp8.engine.kernels import Rotary
from trl_fp8.policy.swapped import holding, own_gradient, with_value


class FollowedNorm:
    """Mixed into the class of a norm. `engine` is the engine's norm."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(x)
        # The norm's parameters are inputs only to get gradients: the engine's norm has copies of their values
        return own_gradient(self._engine_value, self._policy_value, x, *self._direct_parameters().values())

    def _direct_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters(recurse=False))

    def _engine_value(self, x: Tensor, *parameters: Tensor) -> Tensor:
        rows = x.flatten(0, 1) if x.dim() > 2 else x
        return self.engine(rows.to(torch.bfloat16)).view(x.shape)

    def _policy_value(self, x: Tensor, *parameters: Tensor) -> Tensor:
        with holding(self, dict(zip(self._direct_parameters(), parameters, strict=True))):
            return super().forward(x)


class FollowedMLP:
    """Mixed into the class of an MLP `down(act(gate(x)) * up(x))`.

    `engine` computes act(gate) * up `[T, N]` from gate and up, concatenated, `[T, 2 N]`.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(own_gradient(self._engine_value, self._policy_value, gate, up))

    def _engine_value(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.engine(side_by_side(gate, up)).view(gate.shape)

    def _policy_value(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


class FollowedFusedMLP:
    """`FollowedMLP` for an MLP whose gate and up projections are one linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(x)
        return self.down_proj(own_gradient(self._engine_value, self._policy_value, self.gate_up_proj(x)))

    def _engine_value(self, gate_up: Tensor) -> Tensor:
        return self.engine(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], -1)

    def _policy_value(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.activation_fn(gate) * up


class FollowedParallelLayer:
    """Mixed into a decoder layer whose attention and MLP read the same tensor.

    The engine first adds the two outputs, and then adds their sum to the layer's input. transformers uses another
    order.
    """

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        if not self.one_forward.on:
            return super().forward(hidden_states, *args, **kwargs)
        outputs = []  # of attention and MLP

        def note(module: nn.Module, args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            states = output[0] if isinstance(output, tuple) else output
            outputs.append(states.detach())

        with self.self_attn.register_forward_hook(note), self.mlp.register_forward_hook(note):
            policy_sum = super().forward(hidden_states, *args, **kwargs)
        engine_sum = hidden_states.detach() + (outputs[0] + outputs[1])
        return with_value(policy_sum, engine_sum)


class FollowedEmbedding:
    """Mixed into the class of an embedding. Rounds the looked-up rows to BF16, not the whole table."""

    def forward(self, *args, **kwargs) -> Tensor:
        if not self.one_forward.on:
            return super().forward(*args, **kwargs)
        return nn.Embedding.forward(self, *args, **kwargs).to(torch.bfloat16)


class FollowedScaledEmbedding(FollowedEmbedding):
    """Mixed into the class of Gemma's embedding, which multiplies rows by the square root of their width."""

    def forward(self, *args, **kwargs) -> Tensor:
        rows = super().forward(*args, **kwargs)
        if not self.one_forward.on:
            return rows  # Gemma's own forward has scaled them
        return rows * self.embed_scale.to(torch.bfloat16)  # the engine rounds both factors to BF16, too


class FollowedRotary:
    """Mixed into the module that computes cos and sin.

    `engine` maps each layer type to the engine's rotary embedding of these layers. For a model whose layers all have
    one type, the layer type is None.
    """

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple:
        layer_types = () if layer_type is None else (layer_type,)
        if not self.one_forward.on:
            return super().forward(x, position_ids, *layer_types)
        # Compute the policy's cos and sin for the backward, in FP32: transformers takes only device and dtype from x,
        # so pass an empty FP32 tensor
        cos, sin = super().forward(x[:0].float(), position_ids, *layer_types)
        positions = position_ids.expand(x.shape[:2]).flatten()  # `[B * S]`
        call = RotaryCall(self.engine[layer_type], positions, cos, sin)
        return call, call


class RotaryCall:
    """The engine's rotary embedding at the positions of one forward.

    `FollowedRotary` returns it as cos and as sin, and transformers' layers pass both to `apply_rotary_pos_emb`, where
    `RotaryPatch` calls it.
    """

    def __init__(self, engine: Rotary, positions: Tensor, cos: Tensor, sin: Tensor):
        self._engine = engine
        self._positions = positions
        self.cos_sin = (cos, sin)  # the policy's

    def __call__(self, apply: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return query `[B, H, S, D]` and key `[B, G, S, D]`, rotated by the engine.

        Their gradients are those of transformers' function `apply`.
        """

        def engine_value(*states: Tensor) -> tuple[Tensor, ...]:
            by_token = [state.transpose(1, 2) for state in states]  # [B, S, H, D]
            flat = (state.flatten(0, 1).flatten(1) for state in by_token)  # [B S, H D]
            rotated = self._engine(self._positions, *flat)
            return tuple(rows.view(state.shape).transpose(1, 2) for rows, state in zip(rotated, by_token, strict=True))

        def policy_value(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return apply(query, key, *self.cos_sin)

        return own_gradient(engine_value, policy_value, query, key)


class RotaryPatch:
    """Replacement of transformers' `apply_rotary_pos_emb`. Calls `cos` if it is a `RotaryCall`, else the original."""

    def __init__(self, apply: Callable):
        self._apply = apply

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor | RotaryCall, sin: Tensor | RotaryCall, *args, **kwargs
    ) -> tuple:
        if not isinstance(cos, RotaryCall):
            return self._apply(q, k, cos, sin, *args, **kwargs)
        if args or kwargs:
            raise TypeError(
                "fp8_forward='one_forward': the model calls apply_rotary_pos_emb with further arguments, "
                f"{[*args, *kwargs]}, which the engine's rotary embedding does not have. Set fp8_forward='off'."
            )
        return cos(self._apply, q, k)


def side_by_side(left: Tensor, right: Tensor) -> Tensor:
    """Concatenate two tensors `[..., N]` to rows `[T, 2 N]`.

    The result is a view if both are adjacent columns of one tensor (the output of a fused linear layer), else a copy.
    """
    width = left.shape[-1]
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    same_storage = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    same_rows = left.stride() == right.stride() and left.stride(1) == 1
    if same_storage and same_rows and right.storage_offset() == left.storage_offset() + width:
        return left.as_strided((len(left), 2 * width), left.stride(), left.storage_offset())
    return torch.cat([left, right], -1)
