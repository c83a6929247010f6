"""The round trip through an FP8 KV cache, against e4m3 re-derived from its 256 values in float64.

The oracle knows nothing of torch's cast: it decodes all codes from their bits (sign, 4 exponent bits with bias 7, 3
mantissa bits; 0x7f and 0xff are NaN) and searches the nearest value, the even code at a tie.
"""

import math

import numpy as np
import pytest
import torch

from trl_fp8.quantization.codec.e4m3 import E4M3, cache_codes, cache_round_trip, e4m3_values


POW2_SCALES = [2.0**-14, 2.0**-3, 1.0, 2.0**5]


def decoded(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 0x80 else magnitude


VALUES = np.array([decoded(code) for code in range(256)])
MAGNITUDES = VALUES[:127]  # 0 .. 448, ascending; the code is the index


def nearest_even_codes(x: np.ndarray) -> np.ndarray:
    """Codes of float64 `x`; whatever is beyond 448 becomes 448, NaN becomes 0x7f."""
    magnitude = np.minimum(np.nan_to_num(np.abs(x), nan=0.0, posinf=448.0), 448.0)
    above = np.searchsorted(MAGNITUDES, magnitude)  # the smallest code that is not below
    below = np.maximum(above - 1, 0)
    to_above, to_below = MAGNITUDES[above] - magnitude, magnitude - MAGNITUDES[below]  # exact in float64
    codes = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(x), 0x7F, codes | np.where(np.signbit(x), 0x80, 0))


def bf16_rounded(x: np.ndarray) -> np.ndarray:
    """fp32 `x` to the nearest BF16, ties to even, on the bits; NaN stays NaN."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def bytes_of(codes: torch.Tensor) -> np.ndarray:
    assert codes.dtype == E4M3
    bits = codes.view(torch.uint8).numpy()
    return np.where(bits & 0x7F == 0x7F, 0x7F, bits)  # the sign of a NaN means nothing


def every_bf16() -> torch.Tensor:
    """All 65536 values: ties, subnormals, both zeros, infinities, NaN."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def fp32_samples() -> torch.Tensor:
    """Random bit patterns, magnitudes of activations, and the neighbours of every tie of e4m3 and some of BF16's."""
    rng = np.random.default_rng(0)
    ties = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
    bf16_ties = (rng.integers(0x3000, 0x4400, 2000).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    edges = np.concatenate([MAGNITUDES, ties, bf16_ties]).astype(np.float32)
    near = [np.nextafter(edges, np.float32(toward)) for toward in (0, np.inf)]
    nudged = [edges * np.float32(1 + side * 2.0**-power) for side in (-1, 1) for power in (8, 9, 10, 14)]
    edges = np.concatenate([edges, *near, *nudged])
    random_bits = rng.integers(0, 2**32, 50_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    activations = (rng.standard_normal(50_000) * 40).astype(np.float32)
    return torch.from_numpy(np.concatenate([random_bits, activations, edges, -edges]))


def test_the_oracle_knows_the_format():
    assert MAGNITUDES[-1] == 448 and MAGNITUDES[1] == 2.0**-9 and MAGNITUDES[8] == 2.0**-6
    assert (np.diff(MAGNITUDES) > 0).all()
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).double().numpy()
    np.testing.assert_array_equal(codes, VALUES)


@pytest.mark.parametrize("scale", [1.0, 2.0**-12, 0.1, torch.tensor(0.3)])
def test_values_of_every_code(scale):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(VALUES).float() * scale
    expected[[0x7F, 0xFF]] = math.nan
    for given in (codes, codes.view(E4M3), codes.repeat(3, 2).T[:256, 1]):
        found = e4m3_values(given, scale)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit(), codes >= 0x80)
    expected[[0x7F, 0xFF]] = torch.tensor([480.0, -480.0]) * scale
    assert torch.equal(e4m3_values(codes, scale, nan=False), expected)


@pytest.mark.parametrize("scale", POW2_SCALES)
def test_codes_of_every_bf16_value(scale):
    x = every_bf16()
    expected = nearest_even_codes(x.double().numpy() / scale)
    np.testing.assert_array_equal(bytes_of(cache_codes(x, scale)), expected)
    assert set(expected) == set(range(256)) - {0xFF}  # every code, both zeros and NaN are reached
    np.testing.assert_array_equal(bytes_of(cache_codes(x.float(), scale)), expected)


@pytest.mark.parametrize("scale", [*POW2_SCALES, 0.1])
def test_codes_of_fp32_values(scale):
    x = fp32_samples()
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = bf16_rounded(x.numpy()) / np.float32(scale)  # the one division, correctly rounded in fp32
        expected = nearest_even_codes(quotient.astype(np.float64))
        once = nearest_even_codes((x.numpy() / np.float32(scale)).astype(np.float64))
    np.testing.assert_array_equal(bytes_of(cache_codes(x, scale)), expected)
    assert (expected != once).sum() > 50  # the samples tell rounding twice from rounding once


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (1.0625, 0x38),  # half way between 1 and 1.125: down to the even code
        (1.1875, 0x3A),  # half way between 1.125 and 1.25: up to the even code
        (2.0**-10, 0x00),  # half of the smallest subnormal
        (1.5 * 2.0**-9, 0x02),  # half way between the first two subnormals
        (7.5 * 2.0**-9, 0x08),  # half way between the largest subnormal and the smallest normal
        (-0.0, 0x80),
        (-(2.0**-12), 0x80),  # underflow keeps the sign
        (464.0, 0x7E),  # a wider format would go to 480 from here on
        (1e38, 0x7E),
        (math.inf, 0x7E),
        (-math.inf, 0xFE),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_at_the_edges(x, code, dtype):
    assert cache_codes(torch.tensor([x], dtype=dtype), 1.0).view(torch.uint8).item() == code


def test_fp32_is_rounded_to_bf16_first():
    x = torch.tensor([1.0625 + 2.0**-12])  # beyond the tie, but less than half a BF16 step (2**-8) beyond it
    assert cache_codes(x, 1.0).view(torch.uint8).item() == 0x38
    assert x.to(E4M3).view(torch.uint8).item() == 0x39
    assert cache_codes(x.bfloat16(), 1.0).view(torch.uint8).item() == 0x38


def test_nan_stays_nan_and_stays_alone():
    x = torch.tensor([1.0, math.nan, -3.0])
    assert cache_codes(x, 0.5).isnan().tolist() == [False, True, False]
    assert cache_round_trip(x, 0.5).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", POW2_SCALES)
def test_the_round_trip_is_the_codes_times_the_scale_exactly(scale, dtype):
    x = fp32_samples().to(dtype)
    x = x[x.isfinite()]
    once = cache_round_trip(x, scale)
    assert once.dtype == dtype
    assert torch.equal(once.double(), torch.from_numpy(VALUES[bytes_of(cache_codes(x, scale))] * scale))
    assert torch.equal(once.bfloat16().double(), once.double())  # no second rounding in BF16
    assert torch.equal(cache_round_trip(once, scale), once)
    assert not torch.equal(once, x.bfloat16().to(dtype))


def test_only_powers_of_two_are_exact_in_bf16():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    inexact = cache_round_trip(x, 0.1)
    assert not torch.equal(inexact.bfloat16().float(), inexact)


@pytest.mark.parametrize("scale", POW2_SCALES)
def test_the_error_is_bounded_by_the_format(scale):
    """BF16 has 8 significant bits, so it adds at most 2**-8 |x|; e4m3 has 4, or a step of 2**-9 below 2**-6."""
    x = fp32_samples()
    x = x[x.abs() <= 448 * scale]
    error = (cache_round_trip(x, scale).double() - x.double()).abs()
    magnitude = x.double().abs()
    normal, subnormal = 2.0**-4 * (1 + 2.0**-8) * magnitude, torch.full_like(magnitude, 2.0**-10 * scale)
    assert (error <= 2.0**-8 * magnitude + torch.maximum(normal, subnormal)).all()

    exact = every_bf16().double()
    exact = exact[(exact.abs() >= 2.0**-6 * scale) & (exact.abs() <= 448 * scale)]
    relative = (cache_round_trip(exact, scale) / exact - 1).abs().max().item()
    assert relative == pytest.approx(1 / 17, rel=1e-12)  # 17/16 goes to 1, and nothing is worse


def test_saturated_elements_come_back_as_the_largest():
    x = torch.tensor([449.0, -1e30, 448.0, -450.0])
    assert cache_round_trip(x, 1.0).tolist() == [448.0, -448.0, 448.0, -448.0]
    assert cache_round_trip(x, 2.0**-3).tolist() == [56.0, -56.0, 56.0, -56.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_passes_unchanged(dtype):
    x = torch.tensor([0.0, -0.0, 1.03, 1e-5, -300.0, 449.0, -1e6], dtype=dtype).requires_grad_()
    scale = torch.tensor(1.0)
    gradient = torch.tensor([0.3, -7.0, 1e-20, 5.0, 0.1, 3.0, -2.0], dtype=dtype)
    cache_round_trip(x, scale).backward(gradient)
    assert torch.equal(x.grad, gradient)  # saturated ones too: a clamp would give 0 for the last two
    assert x.grad.dtype == dtype and scale.grad is None


def test_gradients_are_those_of_the_function_at_the_rounded_point():
    """As gradcheck: central differences of what comes after, at the round-tripped x, since dx = dy."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 6, generator=generator, dtype=torch.float64)

    def after(y):
        return weights * torch.sin(3 * y)

    after(cache_round_trip(x, 0.25)).sum().backward()

    def differences(at, step=1e-5):
        return (after(at + step) - after(at - step)) / (2 * step)

    # a central difference is off by step**2 / 6 times the third derivative: 1e-10 / 6 * 27 |w|, and by 1e-16 / step
    bound = {"rtol": 0, "atol": 27 / 6 * 1e-10 * weights.abs().max().item() + 1e-10}
    torch.testing.assert_close(x.grad, differences(cache_round_trip(x.detach(), 0.25)), **bound)
    assert (x.grad - differences(x.detach())).abs().max() > 1e-2  # the gradient at the unrounded x is another one


@pytest.mark.parametrize("scale", [2.0**-4, 0.1])
def test_a_scale_is_a_number_or_a_tensor(scale):
    x = fp32_samples()
    by_number, tensor = cache_codes(x, scale).view(torch.uint8), torch.tensor(scale)
    assert torch.equal(cache_codes(x, tensor).view(torch.uint8), by_number)
    assert torch.equal(cache_codes(x, tensor[None]).view(torch.uint8), by_number)
    x = x[x.isfinite()]
    assert torch.equal(cache_round_trip(x, tensor), cache_round_trip(x, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_not_modified(dtype):
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0)).mul_(500).to(dtype)
    before, scale = x.clone(), torch.tensor(0.25)
    round_tripped = cache_round_trip(x, scale)
    cache_codes(x, scale)
    assert torch.equal(x, before) and scale.item() == 0.25
    assert round_tripped.data_ptr() != x.data_ptr() and not torch.equal(round_tripped, x)
    # attention gets k and v as transposed views
    assert torch.equal(cache_round_trip(x.transpose(1, 2), scale), round_tripped.transpose(1, 2))
