"""Scales from amax: never saturating, never a default, at most one power of two too large.

And the layers that no scale serves: what rounding k to e4m3 does to the attention logits.
"""

import math

import pytest
import torch

from trl_fp8.quantization.codec.e4m3 import E4M3, cache_round_trip
from trl_fp8.quantization.codec.kv_scales import (
    E4M3_RELATIVE_ERROR,
    LOGIT_ERROR_LIMIT,
    kv_scales_from_amax,
    logit_error,
    outlier_layers,
)
from trl_fp8.quantization.formats import E4M3_MAX


@pytest.mark.parametrize("margin", [1.0, 1.05, 2.0])
def test_the_margin_times_amax_fits_and_nothing_is_wasted(margin):
    amax = torch.logspace(-6, 4, 60).view(20, 3)
    scales = kv_scales_from_amax(amax, margin).values
    assert torch.equal(torch.log2(scales), torch.log2(scales).round())
    assert (amax * margin <= E4M3_MAX * scales).all()
    assert (amax * margin > E4M3_MAX * scales / 2).all()
    assert torch.equal(scales, scales.bfloat16().float())  # vLLM reads a checkpoint's scales as BF16
    assert ((amax * margin / scales).to(E4M3).float() <= E4M3_MAX).all()


def test_lookup_by_layer_and_name():
    scales = kv_scales_from_amax(torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), 1.0)
    assert len(scales) == 2
    assert [scales.scale(1, which) / scales.scale(0, which) for which in "qkv"] == [8, 8, 8]
    assert scales.scale(0, "q") * 4 == scales.scale(0, "k") * 2 == scales.scale(0, "v")


def test_layers_that_cache_nothing_have_no_scales():
    amax = torch.ones(5, 3)
    amax[[0, 2, 3]] = torch.tensor([0.0, float("nan"), 7.0])[:, None]  # whatever was seen there
    scales = kv_scales_from_amax(amax, 1.0, layers=(1, 4))
    assert scales.layers == (1, 4) and len(scales) == 5
    assert torch.equal(scales.values[[0, 2, 3]], torch.zeros(3, 3))
    assert torch.equal(scales.values[[1, 4]], kv_scales_from_amax(torch.ones(2, 3), 1.0).values)
    assert kv_scales_from_amax(torch.ones(2, 3)).layers == (0, 1)
    with pytest.raises(ValueError, match=r"calibrated: layer 3 q \(amax inf\)"):
        kv_scales_from_amax(amax.where(amax != 7, float("inf")), 1.0, layers=(1, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_bad_amax_names_the_layer_and_never_becomes_one(bad):
    amax = torch.ones(4, 3)
    amax[2, 1] = bad
    with pytest.raises(ValueError, match=r"layer 2 k \(amax"):
        kv_scales_from_amax(amax)


def test_a_subnormal_amax_does_not_become_a_scale_of_one():
    """Over 448 it is 0 in FP32."""
    scales = kv_scales_from_amax(torch.full((1, 3), 2.0**-149)).values
    assert torch.equal(scales, torch.full((1, 3), 2.0**-126)), scales


def tokens_of_head(tokens: int, heads: int, size: int, seed: int) -> torch.Tensor:
    """`[T, heads, D]`, normal; every head and channel with another standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(heads, size, generator=generator) * 2 + 0.2
    return torch.randn(tokens, heads, size, generator=generator) * spread


def mean_squares(states: torch.Tensor) -> torch.Tensor:
    return states.square().mean(0)


def test_relative_error_of_e4m3():
    """Measured over four binades: 10**5 errors leave 0.2 % (one sigma), rounding to BF16 before e4m3 adds 0.2 %."""
    x = torch.exp2(torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 4)
    relative = cache_round_trip(x, 1.0) / x - 1
    assert relative.square().mean().sqrt().item() == pytest.approx(E4M3_RELATIVE_ERROR, rel=0.01)


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 16), (6, 2, 24), (2, 1, 64)])
def test_logit_error_is_the_formula_of_the_worst_head(heads, groups, size):
    q = mean_squares(tokens_of_head(50, heads, size, seed=1))
    k = mean_squares(tokens_of_head(50, groups, size, seed=2))
    by_head = [
        0.3 * E4M3_RELATIVE_ERROR * math.sqrt(math.fsum((q[h].double() * k[h * groups // heads].double()).tolist()))
        for h in range(heads)
    ]
    error = logit_error(q, k, 0.3).item()
    assert error == pytest.approx(max(by_head), rel=1e-5)  # at most 64 fp32 terms: 64 * 2**-24
    assert error > 1.02 * min(by_head)
    if 1 < groups < heads:  # heads 0 .. H/G - 1 share the first group; taking turns would give another number
        in_turns = max((q[h].double() * k[h % groups].double()).sum().sqrt() for h in range(heads))
        assert error != pytest.approx(0.3 * E4M3_RELATIVE_ERROR * in_turns.item(), rel=1e-3)


@pytest.mark.parametrize("bias", [0.0, 30.0])
def test_logit_error_is_what_rounding_k_does_to_the_logits(bias):
    """Measured over 2000 keys and as many queries, which leaves a few percent; 10 % would not pass a wrong power of D.

    A channel that its bias dominates stays in one place of its binade, 1.0 .. 2.0, and its relative error there is
    (1 / 8) / sqrt(12) / place: 0.036 .. 0.018, 1.36 to 0.68 times the average.
    """
    q, k = tokens_of_head(2000, 1, 64, seed=3)[:, 0], tokens_of_head(2000, 1, 64, seed=4)[:, 0]
    k[:, 7] += bias
    scaling = 64**-0.5
    scale = kv_scales_from_amax(k.abs().max().expand(1, 3)).scale(0, "k")
    error = (scaling * q @ (cache_round_trip(k, scale) - k).T).square().mean().sqrt().item()
    expected = logit_error(mean_squares(q)[None], mean_squares(k)[None], scaling).item()
    assert (0.65 < error / expected < 1.4) if bias else (0.9 < error / expected < 1.1)


@pytest.mark.parametrize("channels", [(1, 64), (2, 64), (2, 128)])
def test_a_bias_on_k_is_an_outlier_however_few_channels_there_are(channels):
    q, k = tokens_of_head(200, *channels, seed=5), tokens_of_head(200, *channels, seed=6)
    scaling = channels[1] ** -0.5
    ordinary = logit_error(mean_squares(q), mean_squares(k), scaling)
    k[:, 0, 3] += 200 * k[:, 0, 3].std() / q[:, 0, 3].std()
    biased = logit_error(mean_squares(q), mean_squares(k), scaling)
    assert list(outlier_layers(torch.stack([ordinary, biased, ordinary]))) == [1]


def test_outlier_layers_are_beyond_the_limit_and_come_with_their_error():
    limit = torch.tensor(LOGIT_ERROR_LIMIT)
    above = torch.nextafter(limit, torch.tensor(1.0))
    errors = torch.stack([above * 4, limit * 0.999, limit / 2, above * 1.001])
    found = outlier_layers(errors)
    assert found == {0: errors[0].item(), 3: errors[3].item()}
    assert all(isinstance(layer, int) and isinstance(error, float) for layer, error in found.items())
    assert outlier_layers(errors[1:3]) == {}
