"""Bounds on the difference between a module of the policy and the engine's on one input, if only rounding differs.

BF16 keeps 8 significant bits and e4m3 keeps 4. Rounding to nearest moves a value by half a step at most:

    |round(v) - v|  <=  u |v|        u = 2^-8 (BF16), 2^-4 (e4m3)

Below 2^-6 of its scale e4m3 has steps of 2^-9 of that scale. A scale is at most 2 amax / 448 (it may be rounded up to
a power of two), so that half a step is less than 2^-17 amax, which is u times 2^-13 amax.

A module that rounds each number a few times has a bound for each of its outputs (values.py). A matrix product adds up
thousands of roundings with independent signs, so that their squares add up. The sum of their absolute values would be
a bound that any output passes. FP32 sums round at 2^-24, which is below all of these bounds.

Shape letters: T tokens, K in-features, N out-features, D draws.
"""

import torch
from torch import Tensor


U8, U16 = 2.0**-4, 2.0**-8
SMALL = 2.0**-13  # of the largest value: a value of this size or less is rounded like one of this size
ROWS = 1024  # of a weight that are squared at a time


def linear_bound(x_TK: Tensor, weight_NK: Tensor, own_TN: Tensor, unit: float) -> Tensor:
    """`[T]`: root of the summed squares of a token's errors, of `y = x @ W.T` with both operands rounded by `unit`.

        |x w - round(x) round(w)|  <=  2 u |x w|          of each of K products
        bound^2  =  sum_NK (2 u x w)^2 + (2 u16 |y|)^2    the second: outputs and partial sums are BF16

    The first term takes the largest error of each product, whose mean square is a ninth of it. Rounding therefore
    stays below the bound, and the error of another weight, which is as large as y, does not.
    """
    x_TK, whole = x_TK.double().abs(), weight_NK.detach()
    x_TK = (x_TK + SMALL * x_TK.amax(-1, keepdim=True)).square()
    largest = SMALL * max(whole.max().item(), -whole.min().item())
    columns_K = torch.zeros(whole.shape[1], dtype=torch.float64, device=whole.device)
    for rows in whole.split(ROWS):  # no copy of the weight
        columns_K += (rows.abs().double() + largest).square().sum(0)
    return (4 * unit**2 * (x_TK @ columns_K) + (2 * U16 * own_TN.double().norm(dim=-1)).square()).sqrt()


def experts_bound(responses_DTK: Tensor, own_TK: Tensor) -> Tensor:
    """`[T]`, likewise, of experts: two products with a function between them.

    `responses_DTK` says by how much the output changes where each input moves by `u`, up or down by chance, D times.
    Four operands are rounded: input, both weights, and what is between them. Each has an effect like the input's, and
    the squares of four independent effects add up to the square of twice one.
    """
    response_T = responses_DTK.double().square().sum(-1).mean(0).sqrt()
    return 2 * response_T + 2 * U16 * own_TK.double().norm(dim=-1)


def activation_bound(own: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the bound of each output of act(gate) * up, where act and the product are rounded to BF16. Far below 0 a
    GELU is a difference of FP32 numbers that nearly cancel.
    """
    return 3 * U16 * own.abs() + 2.0**-20 * (gate * up).abs()


def excess(found: Tensor, own: Tensor, bound: Tensor) -> float:
    """An error over its bound; infinite if an output is no number.

    A bound of each element gives the largest ratio, a bound `[T]` of each token's norm the root mean square of ratios.
    """
    error, bound = found.double() - own.double(), bound.double().clamp_min(1e-30)
    if bound.dim() < error.dim():
        ratio = (error.norm(dim=-1) / bound).square().mean().sqrt()
    else:
        ratio = (error.abs() / bound).max()
    return ratio.nan_to_num(nan=float("inf")).item()
