"""How far a module of the policy and the engine's may be apart on the same input, if all that differs is rounding.

BF16 keeps 8 significant bits and e4m3 keeps 4, and rounding to nearest moves a value by half a step at most:

    |round(v) - v|  <=  u |v|        u = 2^-8 (BF16), 2^-4 (e4m3)

Below 2^-6 of its scale e4m3 has steps of 2^-9 of that scale. A scale is at most 2 amax / 448 (it may be rounded up to
a power of two), so that half a step is less than 2^-17 amax, which is u times 2^-13 amax.

A module that rounds each number a few times has a bound for each of its outputs. A matrix product adds up thousands of
roundings whose signs have nothing to do with each other, so that their squares add up: the sum of their absolute
values would be a bound that anything passes. Sums of FP32 round at 2^-24, which none of this sees.

Shape letters: T tokens, K in-features, N out-features, E experts.
"""

import torch
from torch import Tensor


U8, U16 = 2.0**-4, 2.0**-8
SMALL = 2.0**-13  # of the largest value: what rounds like a value of this size, or less
ROWS = 1024  # of a weight that are squared at a time


def linear_bound(x_TK: Tensor, weight_NK: Tensor, own_TN: Tensor, unit: float) -> Tensor:
    """`[T]`: root of the summed squares of a token's errors, of `y = x @ W.T` with both operands rounded by `unit`.

        |x w - round(x) round(w)|  <=  2 u |x w|          of each of K products
        bound^2  =  sum_NK (2 u x w)^2 + (2 u16 |y|)^2    the second: outputs and partial sums are BF16

    The first term is what the errors of one product can be, not what they are on average, a ninth of that: whatever is
    below 1 is explained by rounding, and errors of another weight, as large as y, are not.
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

    `responses_DTK`: by how much the output changes where each input is moved by `u`, up or down by chance, D times.
    Four operands are rounded: input, both weights, and what is between them. Each has an effect like the input's, and
    of four independent ones the squares add up to twice that.
    """
    response_T = responses_DTK.double().square().sum(-1).mean(0).sqrt()
    return 2 * response_T + 2 * U16 * own_TK.double().norm(dim=-1)


def norm_bound(own: Tensor) -> Tensor:
    """Of each output of a norm whose weights are BF16 numbers: x times the inverse root, and that times the weight,
    are rounded to BF16, in either order and at most twice each. The mean that a LayerNorm takes away is FP32.
    """
    own = own.abs()
    return 4 * U16 * own + 2.0**-16 * own.amax(-1, keepdim=True)


def activation_bound(own: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Of each output of act(gate) * up: act and product are rounded to BF16. Far below 0 a GELU is a difference of
    FP32 numbers that nearly cancel.
    """
    return 3 * U16 * own.abs() + 2.0**-20 * (gate * up).abs()


def sum_bound(own: Tensor, hidden: Tensor) -> Tensor:
    """Of each element of `hidden + (attention + MLP)`: both sums are rounded to BF16."""
    return U16 * (2 * own.abs() + hidden.abs())


def lookup_bound(own: Tensor) -> Tensor:
    """Of each element of a row of a table, times a number that may be BF16, too."""
    return 3 * U16 * own.abs()


def turned_bound(state: Tensor, largest: float) -> Tensor:
    """Of each channel of q or k: the sum of two channels times cos and sin, which are at most `largest`. The angles,
    the products and the sum are rounded to BF16. Which two channels, only the policy's function knows: any two.
    """
    return 4 * U16 * largest * 2 * state.abs().amax(-1, keepdim=True)


def attention_bound(own_of_magnitudes: Tensor, cached_in_fp8: bool) -> Tensor:
    """Of each output, with q, k and v as the cache holds them: the weighted mean of |v|, rounded to BF16 twice. Over
    an FP8 cache kernels round the weights to e4m3, too. Scores that are FP32 sums move a weight by less.
    """
    return (2 * U16 + (U8 if cached_in_fp8 else 0)) * own_of_magnitudes


def angle_bound(positions_P: Tensor, largest: float) -> Tensor:
    """`[P, 1]`: of cos and sin, which the engine may hold in BF16. The angle at a position is that many times an FP32
    number, and each of both sides rounds that number and the product.
    """
    return U16 * largest + 2.0**-22 * positions_P[:, None]


def excess(found: Tensor, own: Tensor, bound: Tensor) -> float:
    """The largest error over its bound; infinite if an output is no number."""
    error = (found.double() - own.double()).abs() / bound.double().clamp_min(1e-30)
    return error.nan_to_num(nan=float("inf")).max().item()


def excess_of_rows(found_TN: Tensor, own_TN: Tensor, bound_T: Tensor) -> float:
    """The root mean square over tokens of an error's norm over its bound."""
    error_T = (found_TN.double() - own_TN.double()).norm(dim=-1) / bound_T.clamp_min(1e-30)
    return error_T.square().mean().sqrt().nan_to_num(nan=float("inf")).item()
