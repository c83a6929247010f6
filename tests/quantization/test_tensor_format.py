"""The format "tensor" against its formulas, re-derived in numpy; what its spec says; what a trainer makes of it."""

import numpy as np
import pytest
import torch

from testing import tiny_models
from testing.linears import gradients, inputs, pair
from trl_fp8.features.one_forward.followed_linear import BackwardPrecision
from trl_fp8.quantization.codec.blockwise import dequantize_weight
from trl_fp8.quantization.codec.weights import dead_scale, quantize_as_engine, quantize_fused, stored_scale
from trl_fp8.quantization.formats import FLOORED_SCALE_AMAX, FORMATS, TENSOR, ActivationScaling, format_named
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.recipe import recipe_for, recipe_for_model
from trl_fp8.sync.weight_stream import weight_stream


PER_TOKEN = ActivationScaling("fp32", FLOORED_SCALE_AMAX, "token", True)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
CODES = np.sort(np.unique(E4M3[E4M3.isfinite()].numpy()))


def e4m3(values):
    """Nearest e4m3 value of each, ties to the even mantissa, at most 448; from the list of all values."""
    values = np.clip(np.asarray(values, dtype=np.float64), -448, 448)
    above = np.searchsorted(CODES, values).clip(1, len(CODES) - 1)
    low, high = CODES[above - 1].astype(np.float64), CODES[above].astype(np.float64)
    even = (above - 1 - np.searchsorted(CODES, 0.0)) % 2 == 0  # counted from zero, codes alternate
    return np.where((values - low < high - values) | ((values - low == high - values) & even), low, high)


def scale_of(amax, scale_format, floor):
    scale = np.float32(max(np.float32(amax), np.float32(floor))) / np.float32(448)
    return np.float32(2.0 ** np.ceil(np.log2(np.float64(scale)))) if scale_format == "pow2" else scale


def weights(scale=0.3):
    generator = torch.Generator().manual_seed(0)
    shapes = (48, 80), (16, 80), (16, 80)
    made = [torch.randn(shape, generator=generator) * torch.logspace(-4, 0, 80) for shape in shapes]
    return [(weight * scale * (row + 1)).bfloat16() for row, weight in enumerate(made)]


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("scale", [0.3, 1e-4])  # of the second, even the largest is below the floor
def test_fused_weights_share_the_scale_of_the_largest(scale, scale_format):
    given = weights(scale)
    expected = scale_of(max(weight.abs().max().item() for weight in given), scale_format, 448 * 2**-14)
    for weight, codes in zip(given, quantize_fused(given, TENSOR, scale_format), strict=True):
        assert codes.scale.shape == (1, 1) and codes.scale.item() == expected
        assert np.array_equal(codes.qdata.float().numpy(), e4m3(np.float32(weight.float().numpy()) / expected))
        values = dequantize_weight(codes, torch.float32).numpy()
        assert np.array_equal(values, codes.qdata.float().numpy() * expected)
    (alone,) = quantize_fused(given[:1], TENSOR, scale_format)
    assert scale < 0.1 or alone.scale.item() < expected
    assert stored_scale(alone, TENSOR).shape == (1,)


@pytest.mark.parametrize("reciprocal", [False, True])
def test_a_token_has_one_scale(reciprocal):
    """Divided by it as in vLLM's CUDA kernel, or times its rounded reciprocal as in its torch path."""
    x = torch.randn(33, 80, generator=torch.Generator().manual_seed(1)) * torch.logspace(-5, 1, 33)[:, None]
    x = x.bfloat16()
    codes = quantize_as_engine(x, TENSOR, PER_TOKEN._replace(reciprocal=reciprocal))
    assert codes.scale.shape == (33, 1)
    for token, row in enumerate(x.float().numpy()):
        scale = np.float32(max(abs(row).max() / np.float32(448), np.float32(1 / (448 * 512))))
        assert codes.scale[token].item() == scale
        scaled = row * (np.float32(1) / scale) if reciprocal else row / scale
        assert np.array_equal(codes.qdata[token].float().numpy(), e4m3(scaled))


def test_requantized_by_way_of_fp16_codes_stay_from_the_floor_on():
    """What vLLM does to fused weights while loading; two-sided: scales below the floor lose codes."""

    def kept(scale):
        through_fp16 = (CODES * np.float32(scale)).astype(np.float16).astype(np.float32)
        return np.array_equal(e4m3(through_fp16 * (np.float32(1) / np.float32(scale))), CODES)

    floor = 2.0**-14
    assert all(kept(floor * factor) for factor in np.concatenate([np.linspace(1, 2, 500), 2.0 ** np.arange(20)]))
    assert not kept(floor / 8) and not kept(floor / 7)


def test_nan_and_zeros():
    dead = torch.zeros(16, 32).bfloat16()
    broken = dead.clone()
    broken[3, 4] = torch.nan
    assert all(codes.scale <= dead_scale(TENSOR, "pow2") for codes in quantize_fused([dead, -dead], TENSOR, "pow2"))
    # A dead weight beside a living one is not told: their scale is one
    assert all(codes.scale > dead_scale(TENSOR, "pow2") for codes in quantize_fused([dead + 1, dead], TENSOR, "pow2"))
    assert all(codes.scale.isnan().all() for codes in quantize_fused([dead, broken], TENSOR, "pow2"))


def test_specs_have_the_numbers_of_their_formats():
    blocks = format_named("blocks")
    assert {name: spec.name for name, spec in FORMATS.items()} == {
        "blocks": "blocks",
        "tensor": "tensor",
        "mxfp8": "mxfp8",
    }
    with pytest.raises(ValueError, match=r"fp8_weight_format='rows' .*\['blocks', 'tensor', 'mxfp8'\]"):
        format_named("rows")
    common = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    assert TENSOR.quantization_config == common
    assert blocks.quantization_config == common | {"weight_block_size": [128, 128]}
    assert TENSOR.weight_bytes((48, 80)) == 48 * 80 + 4 and blocks.weight_bytes((3, 130, 128)) == 3 * 130 * 128 + 24
    assert TENSOR.fits(48, 80) and not TENSOR.fits(48, 8) and not TENSOR.fits(48, 80 / 3)
    assert not set(TENSOR.kernels) & set(blocks.kernels)


@pytest.fixture
def model():
    return tiny_models.build(intermediate_size=208)


def test_the_recipe_of_a_tensor_format(model):
    recipe = recipe_for_model(model, weight_format="tensor")
    assert len(recipe.fp8_modules) == 14 and len(recipe_for_model(model).fp8_modules) == 8  # 208 fills no blocks
    attention = "model.layers.1.self_attn"
    group = tuple(f"{attention}.{kind}.weight" for kind in ("q_proj", "k_proj", "v_proj"))
    assert all(recipe.sharing_scale(name) == group for name in group)
    assert recipe.sharing_scale(f"{attention}.o_proj.weight") == (f"{attention}.o_proj.weight",)
    assert recipe_for_model(model).sharing_scale(group[0]) == group[:1]
    moe = tiny_models.build("qwen3_moe")
    kept = recipe_for(outline_of(moe), weight_format="tensor").kept_modules
    assert "one scale per batch" in kept["model.layers.0.mlp.experts"]


def test_the_stream_waits_for_all_that_share_a_scale(model):
    recipe = recipe_for_model(model, weight_format="tensor")
    names, parameters = [], dict(model.named_parameters())
    for name, tensor in weight_stream(parameters.items(), recipe):
        names.append(name)
        if name.endswith("weight_scale"):
            group = recipe.sharing_scale(name.removesuffix("_scale"))
            amax = max(parameters[peer].bfloat16().abs().max().item() for peer in group)
            assert tensor.shape == (1,) and tensor.item() == scale_of(amax, "pow2", 448 * 2**-14)
    assert sorted(names) == sorted([*parameters, *(f"{name}_scale" for name in recipe.fp8_tensors)])
    first = [name for name in names if "layers.0.mlp" in name]
    assert [name.split(".")[4:] for name in first[:4]] == [
        ["gate_proj", "weight"],
        ["gate_proj", "weight_scale"],
        ["up_proj", "weight"],
        ["up_proj", "weight_scale"],
    ]
    without = [(name, p) for name, p in parameters.items() if "layers.1.mlp.up_proj" not in name]
    with pytest.raises(RuntimeError, match=r"lacks 1 weights .*layers\.1\.mlp\.up_proj\.weight"):
        list(weight_stream(without, recipe))


def test_a_parameter_that_changes_while_its_peers_are_awaited_was_copied(model):
    model = model.bfloat16()
    recipe = recipe_for_model(model, weight_format="tensor")
    expected = {name: tensor.clone() for name, tensor in weight_stream(model.named_parameters(), recipe)}

    def as_zero3_gathers_them():
        for name, parameter in model.named_parameters():
            gathered = parameter.detach().clone()
            yield name, gathered
            gathered.fill_(7)

    for name, tensor in weight_stream(as_zero3_gathers_them(), recipe):
        assert torch.equal(tensor.float(), expected[name].float()), name


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
def test_a_linear_layer_trains(backward):
    """Gradients near those of the plain layer: with an FP8 backward, within a few roundings of 2**-4."""
    x, dy = inputs((9,), 256, 144)
    found, expected = (
        gradients(one, x, dy)[2] for one in reversed(pair(256, 144, BackwardPrecision(backward, format=TENSOR)))
    )
    assert 0 < (found - expected).norm() / expected.norm() < (0.15 if backward == "fp8" else 2**-8)
