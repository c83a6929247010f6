"""A linear layer to try FP8 on, and what its numbers should be: e4m3 re-derived in float64, block by block.

The rounding shares no code with the package: it works on exponents and steps, not on casts.
"""

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


def e4m3(values):
    """float64 -> nearest e4m3 value, ties to even: 3 mantissa bits, exponents from -6, at most 448."""
    exponent = torch.frexp(values)[1] - 1
    step = torch.exp2(exponent.clamp_min(-6).double() - 3)
    return (torch.round(values / step) * step).clamp(-448, 448)


def rounded(values, rows, scale_format, amax_floor=1e-10):
    """Round trip of `[M, K]` in blocks of `rows` x 128, block by block; float64."""
    values, result = values.detach().float(), torch.empty(values.shape, dtype=torch.float64)
    for top in range(0, values.shape[0], rows):
        for left in range(0, values.shape[1], 128):
            block = values[top : top + rows, left : left + 128]
            scale = block.abs().max().clamp_min(amax_floor) / 448
            if scale_format == "pow2":
                scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
            result[top : top + rows, left : left + 128] = e4m3((block / scale).double()) * scale.double()
    return result


def gamma(terms):
    return 1.01 * terms * 2**-24
