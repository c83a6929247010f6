"""The quantizer against torchao (bytes), against a float64 re-derivation (bounds), and at its edges."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.quantization import Float8Tensor
from torchao.quantization.granularity import PerBlock

from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_activation, quantize_weight
from trl_fp8.quantization.codec.e4m3 import ceil_pow2
from trl_fp8.quantization.formats import E4M3_MAX


ALIGNED = [(128, 128), (256, 384), (3, 128, 256), (2, 2, 128, 128)]
RAGGED = [(200, 256), (256, 192), (64, 130), (1, 1), (3, 130, 257)]


def weight(shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values.view(-1)[:: max(1, values.numel() // 7)] *= 50  # a few outliers, so that blocks differ in scale
    return values.to(dtype)


def blocks_of(matrix, row, column):
    return matrix[..., row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]


@pytest.mark.parametrize("shape", ALIGNED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_fp32_scales_equal_torchao_byte_for_byte(shape, dtype):
    w = weight(shape, dtype)
    ours = quantize_weight(w, "fp32")
    theirs = Float8Tensor.from_hp(w.float(), granularity=PerBlock([128, 128]), hp_value_lb=1e-12)
    assert torch.equal(ours.qdata.view(torch.uint8), theirs.qdata.view(torch.uint8))
    assert torch.equal(ours.scale, theirs.scale)
    assert list(ours.block_size) == list(theirs.block_size)
    assert torch.equal(dequantize_weight(ours, torch.float32), theirs.dequantize(torch.float32))


def test_bf16_scales_of_plain_torchao_are_not_what_we_return():
    w = weight((256, 384))
    plain = Float8Tensor.from_hp(w, granularity=PerBlock([128, 128]))
    assert not torch.equal(quantize_weight(w, "fp32").scale, plain.scale)


@pytest.mark.parametrize("shape", ALIGNED + RAGGED)
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_error_is_at_most_half_a_step_of_the_format(shape, scale_format):
    w = weight(shape)
    quantized = quantize_weight(w, scale_format)
    assert quantized.qdata.shape == w.shape
    assert quantized.scale.shape == (*w.shape[:-2], -(-w.shape[-2] // 128), -(-w.shape[-1] // 128))
    restored = dequantize_weight(quantized, torch.float32).double()
    for row in range(quantized.scale.shape[-2]):
        for column in range(quantized.scale.shape[-1]):
            block, back = blocks_of(w, row, column).double(), blocks_of(restored, row, column)
            scale = quantized.scale[..., row, column].double()[..., None, None]
            amax = block.abs().amax((-2, -1), keepdim=True)
            if scale_format == "pow2":
                assert torch.equal(torch.log2(scale), torch.log2(scale).round())
                assert (scale >= amax / E4M3_MAX).all() and (scale < 2 * amax / E4M3_MAX).all()
            else:
                torch.testing.assert_close(scale, amax / E4M3_MAX, rtol=2**-23, atol=0)
            # Half a step is 1/16 of the value for normal numbers and scale / 1024 below 2**-6 (3 mantissa bits);
            # the division by an fp32 scale moves the value by at most one fp32 rounding more.
            bound = torch.maximum(block.abs() / 16, scale / 1024) * (1 + 2**-20)
            assert ((back - block).abs() <= bound).all()


@pytest.mark.parametrize("shape", ALIGNED + RAGGED)
def test_pow2_dequantized_weights_are_exact_in_bf16_and_fp32_ones_are_not(shape):
    w = weight(shape)
    for scale_format, exact in (("pow2", True), ("fp32", w.numel() == 1)):
        quantized = quantize_weight(w, scale_format)
        full = dequantize_weight(quantized, torch.float32)
        assert torch.equal(full, full.bfloat16().float()) is exact
        assert torch.equal(dequantize_weight(quantized), full.bfloat16())


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_ragged_equals_the_zero_padded_weight(scale_format):
    w = weight((200, 300))
    padded = torch.zeros(256, 384, dtype=w.dtype)
    padded[:200, :300] = w
    ragged, whole = quantize_weight(w, scale_format), quantize_weight(padded, scale_format)
    assert torch.equal(ragged.scale, whole.scale)
    assert torch.equal(ragged.qdata.view(torch.uint8), whole.qdata[:200, :300].contiguous().view(torch.uint8))


def test_experts_in_one_call_equal_expert_by_expert():
    w = weight((4, 256, 128))
    together = quantize_weight(w)
    for index in range(4):
        alone = quantize_weight(w[index])
        assert torch.equal(together.qdata[index].view(torch.uint8), alone.qdata.view(torch.uint8))
        assert torch.equal(together.scale[index], alone.scale)


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-44])
def test_dead_blocks_stay_finite(scale_format, value):
    w = weight((256, 128), torch.float32)
    w[:128] = value
    quantized = quantize_weight(w, scale_format)
    assert torch.isfinite(quantized.scale).all() and (quantized.scale > 0).all()
    assert dequantize_weight(quantized)[:128].abs().max() <= 1e-15
    assert torch.equal(quantized.scale[1], quantize_weight(w[128:], scale_format).scale[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_weights_are_refused_by_name_and_block(bad):
    w = weight((256, 384))
    w[130, 300] = bad
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.up_proj.*1 of 6 blocks.*\(1, 2\)"):
        quantize_weight(w, name="model.layers.3.mlp.up_proj")
    assert not torch.isfinite(quantize_weight(w, check_finite=False).scale[1, 2])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="scale_format='ue8m0'"):
        quantize_weight(weight((128, 128)), "ue8m0")
    with pytest.raises(ValueError, match=r"bias has shape \(128,\)"):
        quantize_weight(weight((128,)), name="bias")
    with pytest.raises(ValueError, match="torch.float8_e4m3fn"):
        quantize_weight(quantize_weight(weight((128, 128))).qdata)


def test_input_is_left_alone_and_output_is_new_storage():
    w = weight((128, 256), torch.float32)
    before = w.clone()
    quantize_weight(w)
    assert torch.equal(w, before)


@pytest.mark.parametrize("shape", [(4, 256), (2, 3, 300), (5, 1)])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_activation_groups(shape, scale_format):
    x = weight(shape)
    quantized = quantize_activation(x, scale_format)
    for group in range(quantized.scale.shape[-1]):
        part = x[..., group * 128 : (group + 1) * 128].double()
        ratio = quantized.scale[..., group].double() / (part.abs().amax(-1) / E4M3_MAX)
        assert (ratio >= 1 - 2**-23).all() and (ratio < (2 if scale_format == "pow2" else 1 + 2**-22)).all()
    restored = dequantize_weight(quantized, torch.float32)
    scale = quantized.scale.repeat_interleave(128, -1)[..., : shape[-1]]
    bound = torch.maximum(x.float().abs() / 16, scale / 1024) * (1 + 2**-20)
    assert ((restored - x.float()).abs() <= bound).all()


def test_ceil_pow2_is_exact_at_and_around_every_power():
    exponents = torch.arange(-126, 127).float()
    powers = torch.exp2(exponents)
    assert torch.equal(ceil_pow2(powers), powers)
    above, below = torch.nextafter(powers, torch.tensor(torch.inf)), torch.nextafter(powers, torch.tensor(0.0))
    assert torch.equal(ceil_pow2(above), powers * 2)
    assert torch.equal(ceil_pow2(below)[1:], powers[1:])
    assert torch.isnan(ceil_pow2(torch.tensor([torch.nan])))
    largest = torch.tensor([torch.finfo(torch.float32).max, torch.inf])
    assert torch.isinf(ceil_pow2(largest)).all()
    subnormal = torch.tensor([1.0, 2.0, 3.0, 5.0]) * 2.0**-149
    assert torch.equal(ceil_pow2(subnormal), torch.tensor([1.0, 2.0, 4.0, 8.0]) * 2.0**-149)


class Operations(TorchDispatchMode):
    """Names of torch's operations under it."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_a_power_of_two_is_made_by_exact_operations_alone():
    """CUDA's pow, exp2 and log2 may be off in the last place, and torch's ldexp calls pow."""
    with Operations() as called:
        ceil_pow2(torch.tensor([0.75, 1.0, 1.25]))
    assert "frexp" in called.names and not called.names & {"pow", "exp2", "log2", "ldexp", "exp", "log"}, called.names


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes of live storage that the ops under it made, not counting that of `given`."""

    def __init__(self, given):
        super().__init__()
        self.live, self.now, self.peak = {given.untyped_storage()._cdata: 0}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.live:
                storage = leaf.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.release, storage._cdata)
        return result

    def release(self, key):
        self.now -= self.live.pop(key, 0)


@pytest.mark.parametrize("shape", [(1024, 1024), (1000, 1030), (4, 512, 512)])
def test_temporary_memory_is_at_most_twice_the_bf16_weight(shape):
    w = weight(shape)
    with PeakBytes(w) as memory:
        quantized = quantize_weight(w, check_finite=False)
    returned = quantized.qdata.nbytes + quantized.scale.nbytes
    padded = w.nbytes * (quantized.scale.numel() * 128 * 128) / w.numel()
    assert memory.peak - returned <= 2 * padded * 1.01  # scales and their temporaries are below 1 %


def test_the_memory_meter_sees_what_torchaos_own_quantizer_takes():
    w = weight((1024, 1024))
    with PeakBytes(w) as memory:
        Float8Tensor.from_hp(w.float(), granularity=PerBlock([128, 128]))
    assert memory.peak > 3 * w.nbytes
