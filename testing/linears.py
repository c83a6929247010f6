"""A linear layer to try FP8 on, its FP8 twin, and inputs with outliers."""

import torch
from torch import nn

from trl_fp8.policy.flow.linear import FP8Linears


class Wrapped(nn.Module):
    """One linear under the name `layer`, so that it can be installed by name."""

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


def installed(model, flow, names=("layer",)):
    return FP8Linears.install(model, names, flow)


def pair(columns, rows, flow, bias=True):
    """A plain linear and its FP8 twin."""
    plain, twin = Wrapped(columns, rows, bias), Wrapped(columns, rows, bias)
    installed(twin, flow)
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
