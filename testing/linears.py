"""A linear layer to try FP8 on, its twin that follows an engine, and inputs with outliers."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from trl_fp8.features.one_forward.followed_linear import BackwardPrecision, FollowedLinear, FusedCall, tokens_of
from trl_fp8.features.one_forward.one_forward import OneForward
from trl_fp8.policy.swapped import swap

from .fake_engine import FakeLinear


class Wrapped(nn.Module):
    """One linear under the name `layer`."""

    def __init__(self, columns, rows, bias=True, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(columns, rows, bias=bias)
        with torch.no_grad():
            self.layer.weight[:, ::17] *= 8  # outlier channels
            ramps = torch.logspace(0, 1, rows)[:, None] * torch.logspace(0, -1.5, columns)
            self.layer.weight *= ramps  # no two blocks have the same scale

    def forward(self, x):
        return self.layer(x)


def follow(linear: nn.Linear, backward: BackwardPrecision) -> FakeLinear:
    """Let `linear` compute as an FP8 engine that holds its present weight. Return the engine's layer."""
    (codes,) = backward.quantize_weights([linear.weight])
    bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)
    engine = FakeLinear({"layer": (codes, bias)})
    attributes = {
        "one_forward": SimpleNamespace(on=True, backward=backward),
        "name": "layer",
        "is_fp8": True,
        "adapted": False,
        "engine": engine,
        "columns": slice(0, linear.out_features),
        "fused": FusedCall(lambda x: engine(tokens_of(x)), 1),
        "x_t_codes": FusedCall(lambda x: backward.quantize_for_backward(tokens_of(x).t()), 1),
    }
    swap(linear, FollowedLinear, **attributes)
    return engine


def pair(columns, rows, backward, bias=True):
    """Return a plain linear and its twin."""
    plain, twin = Wrapped(columns, rows, bias), Wrapped(columns, rows, bias)
    follow(twin.layer, backward)
    return plain, twin


def inputs(lead, columns, rows, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, columns, generator=generator)
    x[..., ::13] *= 20
    dy = torch.randn(*lead, rows, generator=generator) * 1e-3
    dy[..., :7] *= 50
    return x.to(dtype).requires_grad_(), dy.to(dtype)


def gradients(model, x, dy, autocast=None):
    x.grad = None
    model.zero_grad()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        y = model(x)
    y.backward(dy.to(y.dtype))
    bias = model.layer.bias
    return y.detach(), x.grad, model.layer.weight.grad, None if bias is None else bias.grad


def followed_and_plain(forward: OneForward, layer: nn.Module, x: Tensor, dy: Tensor) -> dict[bool, tuple]:
    """Return the output of a layer with LoRA, and its gradients by x, A and B for `dy`: True -> as it follows."""
    found = {}
    for follows in (True, False):
        x_leaf = x.clone().requires_grad_()
        with forward.switched(follows):
            y = layer(x_leaf)
        wanted = [x_leaf, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        found[follows] = y.detach(), torch.autograd.grad(y, wanted, dy)
    return found
