"""The gated delta net of a CPU engine, token by token: decode steps give the same bits as a prefill of their tokens.

vLLM's own CPU kernels pack a convolution's weights for the host's instruction set, so a sync could not write them.
The kernels also scan a prompt in chunks, so a prefill rounds otherwise than decode steps. Here `delta_net` makes a
step of every token. The step reads the state from the cache, updates it in FP64, rounds it to the cache's dtype and
writes it back:

    x       = silu(weighted sum of each channel's last C inputs), rounded to x's dtype
    q, k, v = heads of x; q and k divided by their lengths
    state   = state * exp(-exp(A_log) softplus(a + dt_bias))
    state  += k (v - k state) sigmoid(b)
    out     = q state / sqrt(K), rounded to x's dtype

Shape letters: T tokens, R requests that have a token left, H heads of q and k (of size K), Z heads of v (of size V),
C inputs of the convolution.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from trl_fp8.upstream.patches import patch

from .ops import silu


EPSILON = 1e-6  # added to the squared lengths of q and k, as in vLLM and transformers


def register_cpu_delta_net() -> None:
    """Replace vLLM's operation for runs without speculative decoding by `delta_net`. Idempotent."""
    if gdn_attention._cpu_gdn_attention_nonspec is not delta_net:
        patch(gdn_attention, "_cpu_gdn_attention_nonspec", delta_net)


def delta_net(
    layer: nn.Module, metadata: GDNAttentionMetadata, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor
) -> None:
    """Write a layer's output for `mixed_qkv` `[T, 2HK + ZV]`, b and a `[T, Z]` to `out` `[T, Z, V]`.

    The tokens of a request are consecutive. Requests that decode come first.
    """
    requests = metadata.num_decodes + metadata.num_prefills
    bounds = metadata.non_spec_query_start_loc[: requests + 1].long()
    starts = bounds[:-1]
    lengths = bounds.diff()
    slots = metadata.non_spec_state_indices_tensor[:requests].long()
    inputs, states = _cached(layer)
    if metadata.num_prefills:
        new_slots = slots[~metadata.has_initial_state[:requests]]  # of requests that begin with this forward
        inputs[new_slots] = 0
        states[new_slots] = 0
    weight = layer.conv1d.weight.squeeze(1).double()
    for token in range(int(lengths.max())):
        has_token = lengths > token
        rows = (starts + token)[has_token]
        slots_R = slots[has_token]
        window = torch.cat([inputs[slots_R], mixed_qkv[rows].unsqueeze(-1)], -1)
        x = silu((window.double() * weight).sum(-1)).to(mixed_qkv.dtype)
        inputs[slots_R] = window[..., 1:]
        state, read = _step(layer, states[slots_R].double(), x, b[rows].double(), a[rows].double())
        out[rows] = read
        states[slots_R] = state.to(states.dtype)


def _cached(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return views of a layer's cache: the last inputs of its convolution `[slots, 2HK + ZV, C - 1]`, and states
    `[slots, Z, K, V]`.
    """
    inputs, states = layer.kv_cache[0], layer.kv_cache[1]
    if not is_conv_state_dim_first():
        inputs = inputs.transpose(-1, -2)
    return inputs, states.view(*states.shape[:2], layer.head_k_dim, layer.head_v_dim)


def _step(layer: nn.Module, state: Tensor, x: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after one token of each request, FP64 `[R, Z, K, V]`, and the output `[R, Z, V]`."""
    # Divide x into heads of q, k and v
    key_channels = layer.key_dim // layer.tp_size  # of all heads of q together, and of all heads of k
    value_channels = x.shape[-1] - 2 * key_channels
    heads = state.shape[1]  # Z
    q, k, v = x.double().split([key_channels, key_channels, value_channels], -1)
    q_RZK = _unit(q.unflatten(-1, (-1, layer.head_k_dim)), heads)
    k_RZK = _unit(k.unflatten(-1, (-1, layer.head_k_dim)), heads)
    v_RZV = v.unflatten(-1, (heads, -1))

    # The formulas of the module docstring
    decay = (-layer.A_log.double().exp() * functional.softplus(a + layer.dt_bias.double())).exp()
    state = state * decay[..., None, None]
    recalled_RZV = (k_RZK.unsqueeze(-1) * state).sum(-2)  # k state
    change_RZV = (v_RZV - recalled_RZV) * b.sigmoid().unsqueeze(-1)
    state = state + k_RZK.unsqueeze(-1) * change_RZV.unsqueeze(-2)
    read = (q_RZK.unsqueeze(-1) * state).sum(-2) * layer.head_k_dim**-0.5
    return state, read.to(x.dtype)


def _unit(heads_RHK: Tensor, heads: int) -> Tensor:
    """Divide each head of q or k by its length. Repeat each head for the consecutive heads of v that share it, so that
    the result has `heads` heads, as many as v.
    """
    unit = heads_RHK * (heads_RHK.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    return unit.repeat_interleave(heads // heads_RHK.shape[1], 1)
