"""Scales from amax: never saturating, never a default, at most one power of two too large."""

import pytest
import torch

from trl_fp8.numerics.e4m3 import E4M3, E4M3_MAX
from trl_fp8.numerics.kv_scales import kv_scales_from_amax


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_bad_amax_names_the_layer_and_never_becomes_one(bad):
    amax = torch.ones(4, 3)
    amax[2, 1] = bad
    with pytest.raises(ValueError, match=r"layer 2 k \(amax"):
        kv_scales_from_amax(amax)
