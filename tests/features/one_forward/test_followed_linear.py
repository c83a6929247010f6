"""Linear layers that follow an engine: its values, and gradients against float64 re-derivations.

Rounding facts used in the bounds: BF16 rounds by at most 2**-8 of the value (8 significant bits); a sum of n products
in FP32, in any order, is off by at most gamma(n) = n * 2**-24 of the sum of their magnitudes (to first order; 1 % is
added for the rest); e4m3 rounds by at most 1/16 of a normal value and by scale / 1024 of one below the normal range.
"""

import gc
import weakref

import pytest
import torch

from testing.fp8_oracle import gamma, rounded
from testing.linears import gradients, inputs, pair
from trl_fp8.features.one_forward import followed_linear as module
from trl_fp8.features.one_forward.followed_linear import BackwardPrecision, FusedCall
from trl_fp8.quantization.formats import MXFP8


# (leading dims, K, N, bias)
SHAPES = [((3, 25), 256, 384, True), ((75,), 256, 128, False), ((2, 2, 20), 200, 130, True)]
BACKWARDS = pytest.mark.parametrize("backward", ["bf16", "fp8"])


class TestFusedCall:
    @pytest.fixture
    def call(self):
        self.made = []
        return FusedCall(lambda x: self.made.append(x.clone()) or 2 * x, readers=3)

    def test_readers_of_one_tensor_get_one_result_and_then_it_is_let_go(self, call):
        x = torch.randn(4, 8)
        first = call(x)
        assert call(x) is first and call(x) is first and len(self.made) == 1
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None
        assert call(x) is not None and len(self.made) == 2

    def test_an_input_that_changed_or_is_another_one_is_computed_anew(self, call):
        x = torch.randn(4, 8)
        first = call(x)
        x.mul_(2)
        assert torch.equal(call(x), 2 * first)
        assert torch.equal(call(x.clone()), 2 * first) and len(self.made) == 3

    def test_inputs_of_inference_mode_whose_changes_nobody_counts_are_computed_each_time(self, call):
        with torch.inference_mode():
            x = torch.randn(4, 8)
            assert call(x) is not call(x)

    def test_a_waiting_result_keeps_no_input(self):
        x, call = torch.randn(4, 8), FusedCall(lambda x: 2 * x, readers=3)
        gone = weakref.ref(x)
        call(x)
        del x
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead, columns, rows, bias", SHAPES)
def test_values_are_the_engines_whatever_autocast_says(lead, columns, rows, bias, autocast):
    plain, twin = pair(columns, rows, BackwardPrecision(), bias)
    x, dy = inputs(lead, columns, rows)
    y = gradients(twin, x, dy, autocast)[0]
    x = x.detach().view(-1, columns)
    x_hat, w_hat = rounded(x.bfloat16(), 1, "pow2"), rounded(twin.layer.weight.bfloat16(), 128, "pow2")
    product = (x_hat @ w_hat.T).bfloat16()
    expected = product + twin.layer.bias.detach().bfloat16() if bias else product
    assert y.dtype == torch.bfloat16 and y.shape == (*lead, rows) and torch.equal(y.view(-1, rows), expected)
    assert (y.view(-1, rows) - plain(x)).norm() / plain(x).norm() > 0.01


@pytest.mark.parametrize("lead, columns, rows, bias", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_bf16_backward_is_straight_through(lead, columns, rows, bias, dtype, autocast):
    """dX = dY W and dW = dY^T X of unquantized operands, X and dY in BF16 as they pass from layer to layer."""
    _, twin = pair(columns, rows, BackwardPrecision(), bias)
    twin.to(dtype)
    x, dy = inputs(lead, columns, rows, dtype=dtype)
    _, dx, dw, db = gradients(twin, x, dy, autocast)
    rounded_x, dy = x.detach().bfloat16().double().view(-1, columns), dy.bfloat16().double().view(-1, rows)
    weight, step = twin.layer.weight.detach().double(), 0 if dtype == torch.float32 else 2**-8
    for got, a, b in ((dx.view(-1, columns), dy, weight), (dw, dy.T, rounded_x)):
        product = a @ b
        bound = 2 * gamma(a.shape[1]) * (a.abs() @ b.abs())
        assert got.dtype == dtype and ((got - product).abs() <= bound + step * (product.abs() + bound)).all()
    if bias:
        total = dy.sum(0)
        bound = gamma(len(dy)) * dy.abs().sum(0)
        assert db.dtype == dtype and ((db - total).abs() <= bound + step * (total.abs() + bound)).all()


def element_error(values):
    """Bound of one round trip's error per element, for any group: pow2 scales are below amax / 224."""
    return torch.maximum(values / 16, values.max() / 224 / 1024)


@pytest.mark.parametrize("lead, columns, rows, bias", SHAPES)
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_fp8_backward_is_jet_rls_formula(lead, columns, rows, bias, scale_format):
    """Q(dY) Q(W) and Q(dY^T) Q(X^T)^T: X is quantized once, along the tokens, and not from the forward's codes."""
    formats = {"scale_format": scale_format, "operand_scale_format": scale_format}
    plain, twin = pair(columns, rows, BackwardPrecision("fp8", **formats), bias)
    x, dy = inputs(lead, columns, rows)
    dy = dy.bfloat16().float()  # as it comes from the next layer
    _, dx, dw, db = gradients(twin, x, dy)
    _, plain_dx, plain_dw, plain_db = gradients(plain, x, dy)
    x, dy, weight = x.detach().view(-1, columns).bfloat16(), dy.view(-1, rows), twin.layer.weight.detach()
    floor = 1e-30
    dy_hat, w_hat = rounded(dy, 1, scale_format, floor), rounded(weight.bfloat16(), 128, scale_format)
    dx, plain_dx = dx.view(-1, columns).double(), plain_dx.view(-1, columns).double()
    assert ((dx - dy_hat @ w_hat).abs() <= gamma(rows) * (dy_hat.abs() @ w_hat.abs())).all()
    x_hat, dy_hat_NT = rounded(x.T, 1, scale_format, floor).T, rounded(dy.T, 1, scale_format, floor)
    assert ((dw.double() - dy_hat_NT @ x_hat).abs() <= gamma(len(x)) * (dy_hat_NT.abs() @ x_hat.abs())).all()
    if bias:
        assert ((db - plain_db).abs() <= 2 * gamma(len(x)) * dy.abs().sum(0)).all()
    for got, expected in ((dx, plain_dx), (dw, plain_dw)):
        relative = (got - expected).norm() / expected.norm()
        assert 0.01 < relative < 0.0625  # rounded indeed, and on average by less than the worst case 1/16


def test_small_gradients_survive_the_fp8_backward():
    plain, twin = pair(256, 128, BackwardPrecision("fp8"))
    x, dy = inputs((40,), 256, 128)
    dy = dy * 1e-18  # below 1e-18, where the floor of activations would leave zeros
    for got, expected in zip(gradients(twin, x, dy)[1:3], gradients(plain, x, dy)[1:3], strict=True):
        error = (got.double() - expected.double()).norm() / expected.double().norm()
        assert 0.01 < error < 0.0625


@BACKWARDS
def test_a_backward_inside_autocast_and_of_a_transposed_gradient_is_the_same(backward):
    _, twin = pair(256, 128, BackwardPrecision(backward))
    x, dy = inputs((9, 3), 256, 128)
    dy = dy.bfloat16()
    outside = gradients(twin, x, dy)[1:3]
    x.grad = twin.layer.weight.grad = None
    y = twin(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.backward(dy.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(x.grad, outside[0]) and torch.equal(twin.layer.weight.grad, outside[1])
    strided = torch.stack([x, x], -1)[..., 0].detach()
    assert not strided.is_contiguous() and torch.equal(twin(strided), y)


@BACKWARDS
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_only_wanted_gradients_are_computed(backward, wanted, monkeypatch):
    _, twin = pair(256, 128, BackwardPrecision(backward))
    x, dy = inputs((9,), 256, 128)
    every = gradients(twin, x, dy)[1:]
    tensors = [x.detach(), twin.layer.weight, twin.layer.bias]
    # Known before the forward, as with LoRA's frozen weights: the others' GEMMs do not run
    for index, name in ((0, "_input_gradient"), (1, "_weight_gradient")):
        if index not in wanted:
            monkeypatch.setattr(module, name, None)
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index in wanted)
        tensor.grad = None
    y = twin(tensors[0])
    y.backward(dy.to(y.dtype))
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor.grad, every[index]) if index in wanted else tensor.grad is None


@BACKWARDS
def test_a_second_derivative_is_refused(backward):
    _, twin = pair(256, 128, BackwardPrecision(backward))
    x, _ = inputs((9,), 256, 128)
    (dx,) = torch.autograd.grad(twin(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_the_backward_keeps_few_tensors():
    def kept(precision, requires_grad=True):
        _, twin = pair(256, 128, precision)
        twin.layer.weight.requires_grad_(requires_grad)
        x, _ = inputs((100,), 256, 128)
        own = [twin.layer.weight, x, twin.layer.engine.codes("layer").qdata, twin.layer.engine.codes("layer").scale]
        own_storages, sizes = {tensor.untyped_storage().data_ptr() for tensor in own}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own_storages:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            assert twin(x).grad_fn is not None
        return sum(sizes.values())

    assert kept(BackwardPrecision()) == 2 * 100 * 256  # the input in BF16
    assert kept(BackwardPrecision("fp8")) == 256 * 100 + 4 * 256  # its codes along the tokens, and their scales
    assert kept(BackwardPrecision(), requires_grad=False) == kept(BackwardPrecision("fp8"), requires_grad=False) == 0


def test_no_tokens_give_no_rows_and_zero_gradients():
    for backward in ("bf16", "fp8"):
        _, twin = pair(256, 128, BackwardPrecision(backward))
        y, dx, dw, db = gradients(twin, torch.zeros(0, 256, requires_grad=True), torch.zeros(0, 128))
        assert y.shape == (0, 128) and dx.shape == (0, 256) and not dw.any() and not db.any()


@BACKWARDS
def test_a_layer_with_mxfp8_weights_trains(backward):
    """Gradients near those of the plain layer: with an FP8 backward, within a few roundings of 2**-4."""
    x, dy = inputs((9,), 256, 144)
    precision = BackwardPrecision(backward, format=MXFP8)
    (_, dx, dw, _), (_, plain_dx, plain_dw, _) = (gradients(one, x, dy) for one in reversed(pair(256, 144, precision)))
    for found, expected in ((dx, plain_dx), (dw, plain_dw)):
        assert 0 < (found - expected).norm() / expected.norm() < (0.15 if backward == "fp8" else 2**-8)
