"""Embeddings, norms, MLPs and rotary embeddings of a policy that follows an engine: all that is between linear layers.

FP8 magnifies small differences. Activations that are off by one BF16 step (1/256) cross an e4m3 rounding boundary
(steps of 1/8) so often that the error after the next linear is as large as that of quantization itself, and each layer
adds to it. So each of these modules calls the engine's module of the same name. A residual sum
or a product of two BF16 tensors is rounded once, which gives the same result wherever it is computed.
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
        return own_gradient(self._value, self._own, x, *self._own_parameters().values())

    def _own_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters(recurse=False))

    def _value(self, x: Tensor, *parameters: Tensor) -> Tensor:
        rows = x.flatten(0, 1) if x.dim() > 2 else x
        return self.engine(rows.to(torch.bfloat16)).view(x.shape)

    def _own(self, x: Tensor, *parameters: Tensor) -> Tensor:
        with holding(self, dict(zip(self._own_parameters(), parameters, strict=True))):
            return self.before.forward(self, x)


class FollowedMLP:
    """Mixed into the class of an MLP `down(act(gate(x)) * up(x))`. `engine` gives act(gate) * up of `[gate, up]`."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(own_gradient(self._value, self._own, gate, up))

    def _value(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.engine(side_by_side(gate, up)).view(gate.shape)

    def _own(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


class FollowedFusedMLP:
    """`FollowedMLP` for an MLP whose gate and up projection are one linear."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_forward.on:
            return super().forward(x)
        return self.down_proj(own_gradient(self._value, self._own, self.gate_up_proj(x)))

    def _value(self, gate_up: Tensor) -> Tensor:
        return self.engine(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], -1)

    def _own(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.activation_fn(gate) * up


class FollowedParallelLayer:
    """Mixed into a decoder layer whose attention and MLP read one tensor: the engine adds both outputs, then x."""

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        if not self.one_forward.on:
            return super().forward(hidden_states, *args, **kwargs)
        outputs = []

        def note(module: nn.Module, args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            outputs.append((output[0] if isinstance(output, tuple) else output).detach())

        with self.self_attn.register_forward_hook(note), self.mlp.register_forward_hook(note):
            own = super().forward(hidden_states, *args, **kwargs)
        return with_value(own, hidden_states.detach() + (outputs[0] + outputs[1]))


class FollowedEmbedding:
    """Mixed into embeddings. Rounds the rows that it looked up, which costs less than rounding the table."""

    def forward(self, *args, **kwargs) -> Tensor:
        if not self.one_forward.on:
            return super().forward(*args, **kwargs)
        return nn.Embedding.forward(self, *args, **kwargs).to(torch.bfloat16)


class FollowedScaledEmbedding(FollowedEmbedding):
    """Mixed into Gemma's embeddings, which scale rows by the root of their width: BF16 by BF16, like the engine."""

    def forward(self, *args, **kwargs) -> Tensor:
        rows = super().forward(*args, **kwargs)
        return rows * self.embed_scale.to(torch.bfloat16) if self.one_forward.on else rows


class FollowedRotary:
    """Mixed into the module that makes cos and sin. `engine`: layer type or None -> rotary embedding."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple:
        layer_types = () if layer_type is None else (layer_type,)
        if not self.one_forward.on:
            return super().forward(x, position_ids, *layer_types)
        # transformers reads only the device and dtype of x: so cos and sin are FP32
        cos, sin = super().forward(x[:0].float(), position_ids, *layer_types)
        call = RotaryCall(self.engine[layer_type], position_ids.expand(x.shape[:2]).flatten(), cos, sin)
        return call, call


class RotaryCall:
    """The engine's rotary embedding of one forward, which transformers' layers hand on in place of cos and sin."""

    def __init__(self, engine: Rotary, positions: Tensor, cos: Tensor, sin: Tensor):
        self._engine, self._positions, self.cos_sin = engine, positions, (cos, sin)

    def __call__(self, apply: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return query `[B, H, S, D]` and key `[B, G, S, D]`, rotated. transformers' `apply` gives the gradient."""

        def value(*states: Tensor) -> tuple[Tensor, ...]:
            by_token = [state.transpose(1, 2) for state in states]  # [B, S, H, D]
            flat = (state.flatten(0, 1).flatten(1) for state in by_token)  # [B S, H D]
            rotated = self._engine(self._positions, *flat)
            return tuple(rows.view(state.shape).transpose(1, 2) for rows, state in zip(rotated, by_token, strict=True))

        def own(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return apply(query, key, *self.cos_sin)

        return own_gradient(value, own, query, key)


class RotaryPatch:
    """Replaces transformers' `apply_rotary_pos_emb`, but calls a `RotaryCall` that comes as cos and sin."""

    def __init__(self, apply: Callable):
        self._apply = apply

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor | RotaryCall, sin: Tensor | RotaryCall, *args, **kwargs
    ) -> tuple:
        if isinstance(cos, RotaryCall):
            return cos(self._apply, q, k, *args, **kwargs)
        return self._apply(q, k, cos, sin, *args, **kwargs)


def side_by_side(left: Tensor, right: Tensor) -> Tensor:
    """Return both `[..., N]` as rows `[T, 2 N]`: a view if they are halves of a fused call's output, else a copy."""
    width = left.shape[-1]
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    same_storage = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    same_rows = left.stride() == right.stride() and left.stride(1) == 1
    if same_storage and same_rows and right.storage_offset() == left.storage_offset() + width:
        return left.as_strided((len(left), 2 * width), left.stride(), left.storage_offset())
    return torch.cat([left, right], -1)
