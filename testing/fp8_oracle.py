"""Oracle of FP8 numbers: e4m3 re-derived in float64, block by block.

It shares no code with the package: rounding works on exponents and steps, not on casts.
"""

import torch


def e4m3(values):
    """Round float64 to the nearest e4m3 value, ties to even: 3 mantissa bits, exponents from -6, at most 448."""
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
