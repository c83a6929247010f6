"""The format "mxfp8": bytes against torchao's `MXTensor` and vLLM's quantizer; its exponents."""

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16, mxfp8_e4m3_quantize

from testing import tiny_models
from trl_fp8.quantization.codec.blockwise import Destination, dequantize_weight, quantize_into
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.codec.weights import (
    as_blocks,
    dead_scale,
    extremes,
    held_weight,
    quantize_as_engine,
    quantize_fused,
    stored_scale,
)
from trl_fp8.quantization.formats import E8M0_AMAX_FLOOR, MXFP8, ActivationScaling
from trl_fp8.recipe.recipe import recipe_for_model


SCALING = ActivationScaling("pow2", E8M0_AMAX_FLOOR)


def numbers(shape=(96, 224), seed=0):
    """Return BF16 numbers of many magnitudes; the amax of some blocks is 448 times a power of two, or next to it."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[-1])
    for row, amax in zip(values.view(-1, shape[-1]), (448, 446, 450, 1.75, 1.7422, 1.7578), strict=False):
        row.clamp_(-amax / 2, amax / 2)
        row[5::32] = amax
    return values.bfloat16()


def codes_of(tensor):
    return tensor.view(torch.uint8)


def torchao(values):
    return MXTensor.to_mx(values, E4M3, block_size=32, scaling_mode=ScaleCalculationMode.RCEIL)


@pytest.mark.parametrize("shape", [(96, 224), (7, 32), (2, 64, 256)])
def test_bytes_are_torchaos_and_vllms(shape):
    values = numbers(shape)
    (codes,) = quantize_fused([values], MXFP8, "pow2")
    sent, theirs = stored_scale(codes, MXFP8), torchao(values)
    assert torch.equal(codes_of(codes.qdata), codes_of(theirs.qdata))
    assert sent.dtype == torch.uint8 and torch.equal(sent, codes_of(theirs.scale))
    of_vllm, exponents = mxfp8_e4m3_quantize(values)
    assert torch.equal(codes_of(codes.qdata), codes_of(of_vllm)) and torch.equal(sent, exponents)
    assert torch.equal(dequantize_weight(codes, torch.bfloat16), theirs.dequantize(torch.bfloat16))
    assert torch.equal(dequantize_weight(codes, torch.bfloat16), dequant_mxfp8_to_bf16(of_vllm, exponents))


def test_the_standards_example_saturates_what_is_kept_here():
    """A block's amax is off by half a step (2^-4) at most; by FLOOR it would be off by up to an eighth."""
    values = numbers()
    (codes,) = quantize_fused([values], MXFP8, "pow2")
    floor = MXTensor.to_mx(values, E4M3, block_size=32, scaling_mode=ScaleCalculationMode.FLOOR)
    amax = values.double().unflatten(1, (-1, 32)).abs().amax(2)
    kept = [
        (each.double().unflatten(1, (-1, 32)).abs().amax(2) / amax - 1).abs().max()
        for each in (dequantize_weight(codes, torch.float32), floor.dequantize(torch.float32))
    ]
    assert kept[0] <= 2.0**-4 < kept[1] <= 2.0**-3


def test_activations_are_quantized_as_vllm_does_from_the_smallest_exponent_on():
    x = torch.cat([numbers(), numbers() * 1e-36, torch.zeros(2, 224).bfloat16()])
    codes = quantize_as_engine(x, MXFP8, SCALING)
    of_vllm, exponents = mxfp8_e4m3_quantize(x)
    assert exponents.min() == 0 and codes.scale.shape == exponents.shape
    assert torch.equal(codes_of(codes.qdata), codes_of(of_vllm))
    assert torch.equal(stored_scale(codes, MXFP8), exponents)


@pytest.mark.parametrize("shape, rows", [((96, 224), 96), ((4096, 256), 4096), ((3, 64, 128), 192)])
def test_what_is_written_into_a_larger_tensor_is_what_its_checksums_say(shape, rows):
    """Of one part, and so large that it is written in several."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = torch.zeros(*shape[:-2], shape[-2] + 64, shape[-1], dtype=torch.uint8)
    exponents = torch.zeros(*shape[:-2], shape[-2] + 64, shape[-1] // 32, dtype=torch.uint8)
    codes, scale = whole[..., 32:-32, :].view(E4M3), exponents[..., 32:-32, :]
    sums = quantize_into([Destination(weight, codes, as_blocks(scale))], "pow2", (1, 32), MXFP8.weight_amax_floor)
    assert sums[0].tolist() == [int(digest(codes)), int(digest(scale))]
    held, (sent,) = held_weight(codes, scale, MXFP8), quantize_fused([weight.bfloat16()], MXFP8, "pow2")
    assert torch.equal(dequantize_weight(held, torch.float32), dequantize_weight(sent, torch.float32))
    assert held.scale.data_ptr() == scale.data_ptr()  # a view
    assert not exponents[..., :32, :].any() and not exponents[..., -32:, :].any()


def test_nan_zeros_and_dead_blocks():
    weight = numbers()
    weight[8] = 0
    weight[9] = 1e-20
    (codes,) = quantize_fused([weight], MXFP8, "pow2")
    assert (codes.scale <= dead_scale(MXFP8, "pow2")).nonzero()[:, 0].unique().tolist() == [8, 9]
    assert not dequantize_weight(codes, torch.float32)[8].any()
    healthy = stored_scale(codes, MXFP8)
    weight[3, 40] = torch.nan
    weight[4, 40] = -torch.inf
    (codes,) = quantize_fused([weight], MXFP8, "pow2")
    broken = stored_scale(codes, MXFP8)
    assert (broken == 255).nonzero().tolist() == [[3, 1], [4, 1]]
    smallest, largest = extremes([healthy, broken])
    assert smallest.tolist() == [dead_scale(MXFP8, "pow2")] * 2
    assert largest[0] == codes.scale[codes.scale.isfinite()].max() and largest[1].isnan()


def test_the_recipe_and_its_bytes():
    model = tiny_models.build(intermediate_size=224)
    recipe = recipe_for_model(model, weight_format="mxfp8")
    assert len(recipe.fp8_modules) == 14 and len(recipe_for_model(model).fp8_modules) == 8  # 224 fills no 128x128
    config = recipe.quantization_config
    assert config["quant_method"] == "mxfp8" and config["weight_block_size"] == [1, 32]
    assert config["ignored_layers"] == list(recipe.kept_modules)
    assert MXFP8.weight_bytes((96, 224)) == 96 * 224 + 2 * 96 * 7
    # vLLM's kernel takes sides from 128 on: of k and v it multiplies with q at once
    narrow = tiny_models.build(head_dim=32)
    split = recipe_for_model(narrow, weight_format="mxfp8", tensor_parallel_size=2)
    kept = split.kept_modules["model.layers.0.self_attn.o_proj"]
    assert kept.startswith("128 x 64 per rank at tensor parallel size 2 has a side below 128")
    assert "model.layers.0.self_attn.k_proj" in split.fp8_modules
    with pytest.raises(ValueError, match=r"scale_format='fp32' .*'mxfp8'.*Use \['pow2'\]"):
        recipe_for_model(model, weight_format="mxfp8", scale_format="fp32")
    kept = recipe_for_model(tiny_models.build("qwen3_moe"), weight_format="mxfp8").kept_modules
    assert "rearrange" in kept["model.layers.0.mlp.experts"]
