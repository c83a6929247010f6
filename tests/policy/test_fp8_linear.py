"""FP8 linears: the numbers against float64 re-derivations, and the layer in every wrapping that the trainer uses.

Rounding facts used in the bounds: BF16 rounds by at most 2**-8 of the value (8 significant bits); a sum of n products
in FP32, in any order, is off by at most gamma(n) = n * 2**-24 of the sum of their magnitudes (to first order; 1 % is
added for the rest); e4m3 rounds by at most 1/16 of a normal value and by scale / 1024 of one below the normal range.
"""

import pytest
import torch
from torch import nn

from testing.fp8_oracle import gamma, rounded
from testing.linears import Wrapped, gradients, inputs, installed, pair
from trl_fp8.policy.flow import linear as fp8_matmul
from trl_fp8.policy.flow.linear import FP8Flow
from trl_fp8.quantization.formats.spec import ActivationScaling


FLOWS = [(forward, backward) for forward in ("weights", "full") for backward in ("bf16", "fp8")]
# (leading dims, K, N, bias)
SHAPES = [((3, 25), 256, 384, True), ((75,), 256, 128, False), ((2, 2, 20), 200, 130, True)]


def oracle_product(x, weight, forward, scale_format, amax_floor=1e-10):
    """(x_hat @ w_hat.T, gamma bound of computing it in FP32), float64 `[T, N]`."""
    x = x.detach().reshape(-1, x.shape[-1])
    x_hat = x.double() if forward == "weights" else rounded(x.bfloat16(), 1, scale_format, amax_floor)
    w_hat = rounded(weight.bfloat16(), 128, scale_format)
    return x_hat @ w_hat.T, gamma(x.shape[-1]) * (x_hat.abs() @ w_hat.abs().T)


@pytest.mark.parametrize("lead, columns, rows, bias", SHAPES)
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_full_forward_is_the_engines_formula(lead, columns, rows, bias, scale_format, autocast):
    flow = FP8Flow(scale_format=scale_format, activation=ActivationScaling(scale_format))
    model = Wrapped(columns, rows, bias)
    installed(model, flow)
    x, _ = inputs(lead, columns, rows)
    y = gradients(model, x, torch.zeros(*lead, rows), autocast)[0]
    assert y.dtype == (autocast or torch.float32) and y.shape == (*lead, rows)
    product, slack = oracle_product(x, model.layer.weight, "full", scale_format)
    expected, allowed = product.bfloat16(), slack + 2**-8 * (product.abs() + slack)
    if bias:
        expected = expected + model.layer.bias.bfloat16()  # BF16 + BF16, rounded again
        allowed = allowed + 2**-8 * (expected.double().abs() + allowed) * 1.01
    y = y.double().view(-1, rows)
    if autocast == torch.float16:  # BF16's 8 bits fit into FP16 unless they are below its normal range, 2**-14
        allowed = allowed + 2**-25
    error = (y - (product + (model.layer.bias.bfloat16().double() if bias else 0))).abs()
    assert (error <= allowed).all()
    # Bit for bit but where another order of accumulation crosses a rounding boundary:
    # of 256 FP32 steps in a BF16 step, a sum of 256 random terms moves by a few
    assert (y != expected.to(autocast or torch.float32).double()).double().mean() <= 0.005


def engines_kernel(x, weight, bias, scale_format):
    """vLLM's base class and the reference kernel (engine/vllm/cpu/linear.py) in plain torch FP32; aligned shapes."""
    x = x.detach().bfloat16().view(-1, x.shape[-1])
    groups = x.float().unflatten(-1, (-1, 128))
    x_scale = groups.abs().amax(-1) / 448
    blocks = weight.detach().bfloat16().float().view(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    w_scale = blocks.abs().amax((1, 3)) / 448
    if scale_format == "pow2":
        x_scale, w_scale = (torch.exp2(torch.ceil(torch.log2(scale.double()))).float() for scale in (x_scale, w_scale))
    codes = (groups / x_scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    w_codes = (blocks / w_scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    dequantized = (codes.float() * x_scale[..., None]).flatten(-2)
    w_hat = (w_codes.float() * w_scale[:, None, :, None]).view(weight.shape)
    y = (dequantized @ w_hat.T).to(torch.bfloat16)
    return y if bias is None else (y + bias.bfloat16()).to(torch.bfloat16)


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_forward_equals_the_reference_kernel_bit_for_bit(scale_format, dtype):
    model = Wrapped(256, 384).to(dtype)
    installed(model, FP8Flow(scale_format=scale_format, activation=ActivationScaling(scale_format)))
    x, _ = inputs((3, 25), 256, 384, dtype=dtype)
    expected = engines_kernel(x, model.layer.weight, model.layer.bias, scale_format)
    differs = model(x).view(-1, 384) != expected.to(dtype)
    # Same operands, same FP32 GEMM; a library that picks another kernel may reorder, which moves few roundings
    assert differs.double().mean() <= 0.001


def test_full_forward_is_neither_unquantized_nor_of_the_fp32_master():
    plain, twin = pair(256, 384, FP8Flow())
    x, _ = inputs((75,), 256, 384)
    y = twin(x)
    assert (y - plain(x)).norm() / plain(x).norm() > 0.01
    master = rounded(twin.layer.weight, 128, "pow2")  # without the BF16 rounding that the engine's bytes have
    wrong = (rounded(x.bfloat16(), 1, "pow2") @ master.T).bfloat16() + twin.layer.bias.bfloat16()
    assert (y != wrong.float()).double().mean() > 0.1  # against 0.001 above
    unrounded = rounded(x, 1, "pow2") @ rounded(twin.layer.weight.bfloat16(), 128, "pow2").T  # x not in BF16 first
    assert (y != (unrounded.bfloat16() + twin.layer.bias.bfloat16()).float()).double().mean() > 0.1


@pytest.mark.parametrize("lead, columns, rows, bias", SHAPES)
def test_weights_forward_is_the_plain_linear_of_the_round_tripped_weight(lead, columns, rows, bias):
    plain, twin = pair(columns, rows, FP8Flow(forward="weights"), bias)
    x, _ = inputs(lead, columns, rows)
    with torch.no_grad():
        plain.layer.weight.copy_(rounded(plain.layer.weight.bfloat16(), 128, "pow2"))
    assert torch.equal(twin(x), plain(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(twin(x), plain(x))


def test_the_floor_of_the_activation_scale_is_the_engines():
    model = Wrapped(256, 128, bias=False)
    x = 1e-5 * torch.randn(10, 256, generator=torch.Generator().manual_seed(0))
    outputs = {}
    for floor in (1e-10, 1 / 512):
        handle = installed(model, FP8Flow(activation=ActivationScaling("fp32", floor), scale_format="fp32"))
        outputs[floor] = model(x).double()
        product, slack = oracle_product(x, model.layer.weight, "full", "fp32", floor)
        assert ((outputs[floor] - product).abs() <= slack + 2**-8 * (product.abs() + slack)).all()
        handle.remove()
    assert not torch.equal(outputs[1e-10], outputs[1 / 512])


@pytest.mark.parametrize("forward", ["weights", "full"])
@pytest.mark.parametrize("lead, columns, rows, bias", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_bf16_backward_is_that_of_the_plain_linear(forward, lead, columns, rows, bias, dtype, autocast):
    plain, twin = pair(columns, rows, FP8Flow(forward), bias)
    x, dy = inputs(lead, columns, rows, dtype=dtype)
    plain.to(dtype)
    twin.to(dtype)
    reference, ours = gradients(plain, x, dy, autocast)[1:], gradients(twin, x, dy, autocast)[1:]
    compute = autocast or dtype
    for expected, got in zip(reference, ours, strict=True):  # straight through: the same GEMMs of the same operands
        if expected is None:
            assert got is None
        elif compute == torch.float32:
            assert got.dtype == expected.dtype and torch.equal(got, expected)
        else:
            # On CPU ours are FP32 GEMMs of the 16-bit operands, theirs round the same sums to 16 bits: one rounding to
            # nearest of each, and FP32's order of summation, which grows with the largest element
            assert got.dtype == expected.dtype
            step = max(torch.finfo(compute).eps, torch.finfo(got.dtype).eps) * expected.float().abs()
            slack = 1e-5 * expected.float().abs().amax() + 2**-24  # the last: FP16's subnormal step
            assert ((got.float() - expected.float()).abs() <= step + slack).all()


def element_error(values):
    """Bound of one round trip's error per element, for any group: pow2 scales are below amax / 224."""
    return torch.maximum(values / 16, values.max() / 224 / 1024)


@pytest.mark.parametrize("forward", ["weights", "full"])
@pytest.mark.parametrize("lead, columns, rows, bias", SHAPES)
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("cached", [True, False])
def test_fp8_backward_is_jet_rls_formula(forward, lead, columns, rows, bias, scale_format, cached):
    flow = FP8Flow(
        forward,
        "fp8",
        scale_format=scale_format,
        activation=ActivationScaling(scale_format),
        cache_weights=cached,
    )
    plain, twin = pair(columns, rows, flow, bias)
    x, dy = inputs(lead, columns, rows)
    _, dx, dw, db = gradients(twin, x, dy)
    _, plain_dx, plain_dw, plain_db = gradients(plain, x, dy)
    x, dy, weight = x.detach().view(-1, columns), dy.view(-1, rows), twin.layer.weight.detach()
    floor = 1e-30
    dy_hat, w_hat = rounded(dy, 1, scale_format, floor), rounded(weight.bfloat16(), 128, scale_format)
    dx, plain_dx = dx.view(-1, columns).double(), plain_dx.view(-1, columns).double()
    assert ((dx - dy_hat @ w_hat).abs() <= gamma(rows) * (dy_hat.abs() @ w_hat.abs())).all()
    seen = x if forward == "weights" else rounded(x.bfloat16(), 1, scale_format)
    x_hat, dy_hat_NT = rounded(seen.T, 1, scale_format, floor).T, rounded(dy.T, 1, scale_format, floor)
    assert ((dw.double() - dy_hat_NT @ x_hat).abs() <= gamma(len(x)) * (dy_hat_NT.abs() @ x_hat.abs())).all()
    if bias:
        assert torch.equal(db, plain_db)
    # Distance to the unquantized gradient: (|a| + e_a)(|b| + e_b) - |a||b| summed, e = half steps of e4m3; the weight
    # and the full forward's input are rounded to BF16 before
    dy, weight, x = dy.abs().double(), weight.abs().double(), x.abs().double()
    bf16, accumulation = 1 + 2**-8, 1 + 2 * gamma(max(rows, len(x)))
    e_dy, e_w, e_x = element_error(dy), element_error(weight * bf16) + weight * 2**-8, element_error(x)
    if forward == "full":
        first = element_error(x * bf16) + x * 2**-8
        e_x = first + element_error(x + first)
    bound_dx = (dy + e_dy) @ (weight + e_w) * accumulation - dy @ weight
    bound_dw = (dy + e_dy).T @ (x + e_x) * accumulation - dy.T @ x
    assert ((dx - plain_dx).abs() <= bound_dx).all() and ((dw - plain_dw).abs() <= bound_dw).all()
    for got, plain_gradient in ((dx, plain_dx), (dw, plain_dw)):
        relative = (got - plain_gradient).norm() / plain_gradient.norm()
        assert 0.01 < relative < 0.0625  # rounded indeed, and on average by less than the worst case 1/16


def test_small_gradients_survive_the_fp8_backward():
    plain, twin = pair(256, 128, FP8Flow(backward="fp8"))
    x, dy = inputs((40,), 256, 128)
    dy = dy * 1e-18  # below 1e-18, where the floor of activations would leave zeros
    for got, expected in zip(gradients(twin, x, dy)[1:3], gradients(plain, x, dy)[1:3], strict=True):
        error = (got.double() - expected.double()).norm() / expected.double().norm()
        assert 0.01 < error < 0.0625


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_dtypes_are_those_of_the_plain_linear(backward, dtype, autocast):
    plain, twin = pair(128, 256, FP8Flow(backward=backward))
    plain.to(dtype)
    twin.to(dtype)
    x, dy = inputs((5,), 128, 256, dtype=dtype)
    reference, ours = gradients(plain, x, dy, autocast), gradients(twin, x, dy, autocast)
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in reference]
    assert all(torch.isfinite(tensor).all() for tensor in ours)


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
def test_a_backward_inside_autocast_computes_in_the_forwards_dtype(backward):
    _, twin = pair(256, 128, FP8Flow(backward=backward))
    x, dy = inputs((9,), 256, 128)
    outside = gradients(twin, x, dy)[1:3]
    x.grad = twin.layer.weight.grad = None
    y = twin(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.backward(dy)
    assert torch.equal(x.grad, outside[0]) and torch.equal(twin.layer.weight.grad, outside[1])


@pytest.mark.parametrize("forward, backward", FLOWS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_only_wanted_gradients_are_computed(forward, backward, wanted, monkeypatch):
    _, twin = pair(256, 128, FP8Flow(forward, backward))
    x, dy = inputs((9,), 256, 128)
    every = gradients(twin, x, dy)[1:]
    tensors = [x, twin.layer.weight, twin.layer.bias]
    some = torch.autograd.grad(twin(x), [tensors[index] for index in wanted], dy)
    assert all(torch.equal(got, every[index]) for got, index in zip(some, wanted, strict=True))
    # Known before the forward, as with LoRA's frozen weights: the others' GEMMs do not run
    for index, name in ((0, "_input_gradient"), (1, "_weight_gradient")):
        if index not in wanted:
            monkeypatch.setattr(fp8_matmul, name, None)
    x = x.detach()
    for index, tensor in enumerate([x, twin.layer.weight, twin.layer.bias]):
        tensor.requires_grad_(index in wanted)
        tensor.grad = None
    twin(x).backward(dy)
    for index, tensor in enumerate([x, twin.layer.weight, twin.layer.bias]):
        assert torch.equal(tensor.grad, every[index]) if index in wanted else tensor.grad is None


def test_what_the_backward_keeps():
    def kept(flow, requires_grad=True):
        _, twin = pair(256, 128, flow)
        twin.layer.weight.requires_grad_(requires_grad)
        x, _ = inputs((100,), 256, 128)
        bytes_kept = {}
        own = {twin.layer.weight.untyped_storage().data_ptr(), x.untyped_storage().data_ptr()}
        own.add(twin.layer.quantized_weight().qdata.untyped_storage().data_ptr())

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                bytes_kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = twin(x)
        assert y.grad_fn is not None
        return sum(bytes_kept.values())

    w_scales = 4 * 2  # 128 x 256 weight: two blocks
    assert kept(FP8Flow()) == 2 * 100 * 256  # the input in BF16
    assert kept(FP8Flow(backward="fp8")) == 100 * 256 + 4 * 100 * 2 + w_scales  # its codes and scales
    assert kept(FP8Flow(), requires_grad=False) == 0
    assert kept(FP8Flow(backward="fp8"), requires_grad=False) == w_scales
    assert kept(FP8Flow(backward="fp8", cache_weights=False), requires_grad=False) == 0  # no unsharded codes


def test_no_tokens_give_no_rows_and_zero_gradients():
    for forward, backward in FLOWS:
        _, twin = pair(256, 128, FP8Flow(forward, backward))
        y, dx, dw, db = gradients(twin, torch.zeros(0, 256, requires_grad=True), torch.zeros(0, 128))
        assert y.shape == (0, 128) and dx.shape == (0, 256) and not dw.any() and not db.any()


@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
def test_why_torchaos_fake_quantizer_is_not_used(granularity):
    """Its backward casts the gradient to e4m3 without a scale, so that ordinary gradients underflow to zero."""
    from torchao.quantization.granularity import PerRow, PerTensor
    from torchao.quantization.qat.fake_quantizer import Float8FakeQuantizeConfig, Float8FakeQuantizer

    where = PerRow() if granularity == "per_row" else PerTensor()
    fake_quantizer = Float8FakeQuantizer(Float8FakeQuantizeConfig(torch.float8_e4m3fn, where))
    plain, twin = pair(256, 128, FP8Flow())
    x, dy = inputs((64,), 256, 128)
    x = x.detach().div(20).requires_grad_()
    nn.functional.linear(fake_quantizer(x), fake_quantizer(plain.layer.weight)).backward(dy)
    zeroed = [(tensor.grad == 0).double().mean().item() for tensor in (x, plain.layer.weight)]
    assert min(zeroed) > 0.99, zeroed
    for got, expected in zip(gradients(twin, x, dy)[1:], gradients(plain, x, dy)[1:], strict=True):
        assert torch.equal(got == 0, expected == 0) and expected.any()
