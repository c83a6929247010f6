"""GEMM backends: layouts and padding against torch's own checks on CPU; the kernels themselves on a Hopper GPU.

Run the second half with `pytest -m gpu`; it was written without a GPU at hand and has not been run.
"""

import pytest
import torch
from torch.nn.functional import ScalingType, scaled_mm

from testing.fp8_oracle import gamma
from testing.linears import Wrapped, inputs, installed, pair
from trl_fp8.policy.flow import gemm as fp8_gemm
from trl_fp8.policy.flow import linear as fp8_linear
from trl_fp8.policy.flow.linear import FP8Flow
from trl_fp8.quantization.blockwise import dequantize_weight, quantize_activation, quantize_weight
from trl_fp8.quantization.formats.spec import ActivationScaling


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")]
# (T, K, N): aligned; rows not a multiple of 4; one block of K; ragged everywhere
SHAPES = [(64, 512, 256), (75, 640, 128), (4, 128, 384), (33, 200, 130)]


def operands(tokens, columns, rows, scale_format="pow2"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, columns, generator=generator) * torch.logspace(-2, 2, columns)
    w = torch.randn(rows, columns, generator=generator) * torch.logspace(1, -1, rows)[:, None]
    return x.bfloat16(), w.bfloat16(), scale_format


def emulated_scaled_mm(a, b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, output_dtype):
    """What cuBLASLt computes, read off its documented layouts; torch checks shapes and strides on the meta device.

    torch's check does not include that M is a multiple of 4, cuBLASLt's does.
    """
    on_meta = [tensor.to("meta") for tensor in (a, b, scale_a, scale_b)]
    assert all(m.stride() == t.stride() for m, t in zip(on_meta, (a, b, scale_a, scale_b), strict=True))
    scaled_mm(*on_meta[:2], on_meta[2], scale_recipe_a, on_meta[3], scale_recipe_b, output_dtype=output_dtype)
    assert a.shape[0] % 4 == 0 and scale_recipe_a == ScalingType.BlockWise1x128
    left = a.double() * scale_a.double().repeat_interleave(128, 1)
    if scale_recipe_b == ScalingType.BlockWise128x128:  # [L4, N/128]
        scale_b = scale_b[: b.shape[0] // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:  # [N, K/128]
        scale_b = scale_b.t().repeat_interleave(128, 0)
    return (left @ (b.double() * scale_b.double())).to(output_dtype)


@pytest.mark.parametrize("tokens, columns, rows", SHAPES)
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("square", [True, False])
def test_scaled_mm_is_handed_the_layouts_that_it_documents(tokens, columns, rows, scale_format, square, monkeypatch):
    monkeypatch.setattr(fp8_gemm.F, "scaled_mm", emulated_scaled_mm)
    x, w, _ = operands(tokens, columns, rows)
    a = quantize_activation(x, scale_format)
    b = quantize_weight(w, scale_format) if square else quantize_activation(w, scale_format)
    expected = dequantize_weight(a, torch.float64) @ dequantize_weight(b, torch.float64).T
    got = fp8_gemm.scaled_mm_gemm(a, b, torch.float32)
    assert got.shape == (tokens, rows)
    # With fp32 scales, dequantizing rounds code * scale to FP32, which can move a sum across a BF16 boundary
    assert (got != expected.bfloat16()).double().mean() <= (0 if scale_format == "pow2" else 0.001)


def test_torchs_own_check_refuses_unpadded_weight_scales():
    a = torch.empty(4, 256, device="meta", dtype=torch.float8_e4m3fn)
    b = torch.empty(128, 256, device="meta", dtype=torch.float8_e4m3fn).t()
    scales = torch.empty(2, 4, device="meta").t(), torch.empty(1, 2, device="meta").t()
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    with pytest.raises(RuntimeError, match="scale b must have shape"):
        scaled_mm(a, b, scales[0], recipes[0], scales[1], recipes[1])


@pytest.mark.parametrize("backward", ["bf16", "fp8"])
@pytest.mark.parametrize("lead, columns, rows", [((3, 25), 256, 384), ((40,), 200, 130)])
def test_a_layer_on_scaled_mm_is_the_layer_on_fake_quant(backward, lead, columns, rows, monkeypatch):
    monkeypatch.setattr(fp8_gemm.F, "scaled_mm", emulated_scaled_mm)
    monkeypatch.setattr(fp8_linear, "require_backend", lambda backend, capability: None)
    results = []
    for backend in ("fake_quant", "scaled_mm"):
        _, twin = pair(columns, rows, FP8Flow(backward=backward, backend=backend))
        x, dy = inputs(lead, columns, rows)
        y = twin(x)
        y.backward(dy)
        results.append((y.detach(), x.grad, twin.layer.weight.grad, twin.layer.bias.grad))
    (y, dx, dw, db), (other_y, other_dx, other_dw, other_db) = results
    assert (y != other_y).double().mean() <= 0.005  # FP32 against float64 accumulation, both rounded to BF16
    assert torch.equal(db, other_db)
    for expected, got in ((dx, other_dx), (dw, other_dw)):
        assert got.dtype == expected.dtype
        # scaled_mm's results are BF16; sums that cancel are off by the FP32 accumulation of their terms instead
        assert ((got - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * expected.abs().max()).all()


@pytest.mark.parametrize("tokens, columns, rows", SHAPES)
def test_bf16_operands_are_exact_with_pow2_scales_only(tokens, columns, rows, monkeypatch):
    """What fake_quant computes on CUDA under BF16: there operands are in the compute dtype."""
    for scale_format in ("pow2", "fp32"):
        x, w, _ = operands(tokens, columns, rows)
        a, b = quantize_activation(x, scale_format), quantize_weight(w, scale_format)
        exact = dequantize_weight(a, torch.float64) @ dequantize_weight(b, torch.float64).T
        left, right = dequantize_weight(a, torch.bfloat16).double(), dequantize_weight(b, torch.bfloat16).double()
        if scale_format == "pow2":
            assert torch.equal(left @ right.T, exact)
        else:
            assert (left @ right.T - exact).norm() > 1e-4 * exact.norm()
        on_cpu = fp8_gemm.fake_quant_gemm(a, b, torch.bfloat16).double()  # FP32 operands in either format
        terms = dequantize_weight(a, torch.float64).abs() @ dequantize_weight(b, torch.float64).abs().T
        assert ((on_cpu - exact).abs() <= gamma(columns) * terms).all()


def test_operand_dtypes():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    names = ("float64", "float32", "bfloat16", "float16")
    on = {kind: [fp8_gemm.operand_dtype(getattr(torch, name), kind) for name in names] for kind in (cpu, cuda)}
    assert on[cpu] == [torch.float64, torch.float32, torch.float32, torch.float32]
    assert on[cuda] == [torch.float64, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("tokens", [128, 75])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_torchaos_function_gets_whole_blocks_of_bf16(tokens, bias, autocast, monkeypatch):
    module = pytest.importorskip("torchao.prototype.blockwise_fp8_training.linear", exc_type=ImportError)

    class Stand_in:
        @staticmethod
        def apply(x, weight, block_size, out_dtype, use_triton):
            assert x.dtype == weight.dtype == out_dtype == torch.bfloat16 and block_size == 128 and not use_triton
            assert x.shape == (128, 256) and not x[tokens:].any()
            assert not torch.is_autocast_enabled("cpu")
            return x @ weight.T

    monkeypatch.setattr(module, "fp8_blockwise_mm", Stand_in)
    monkeypatch.setattr(fp8_linear, "require_backend", lambda backend, capability: None)
    model = Wrapped(256, 128, bias)
    flow = FP8Flow("full", "fp8", scale_format="fp32", activation=ActivationScaling("fp32"), backend="torchao")
    handle = installed(model, flow)
    x, dy = inputs((tokens,), 256, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = model(x)
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    product = x.detach().bfloat16() @ model.layer.weight.detach().bfloat16().T
    expected = product + model.layer.bias.detach().bfloat16() if bias else product
    assert (y != expected.to(y.dtype)).double().mean() <= 0.005  # another number of rows, another GEMM
    y.backward(dy.to(y.dtype))
    assert x.grad.dtype == model.layer.weight.grad.dtype == torch.float32
    assert handle.modules["layer"].cached_weight() is None


def test_torchao_refuses_ragged_layers(monkeypatch):
    monkeypatch.setattr(fp8_linear, "require_backend", lambda backend, capability: None)
    with pytest.raises(ValueError, match="layer: is 130 x 200, and fp8_gemm_backend='torchao' needs multiples of 128"):
        installed(
            Wrapped(200, 130),
            FP8Flow("full", "fp8", scale_format="fp32", activation=ActivationScaling("fp32"), backend="torchao"),
        )


@pytest.mark.parametrize("backend", ["scaled_mm", "torchao"])
def test_backends_that_cannot_run_are_refused_with_the_reason(backend, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fp8_gemm, "_installed", lambda package: "3.7.1")
    fp8_gemm.require_backend(backend, (9, 0))
    with pytest.raises(ValueError, match=f"fp8_gemm_backend='{backend}' on CPU: .*Hopper.*'fake_quant'"):
        fp8_gemm.require_backend(backend, None)
    for capability in ((8, 9), (10, 0), (12, 0)):
        with pytest.raises(ValueError, match=r"on compute capability {}\.{}: ".format(*capability)):
            fp8_gemm.require_backend(backend, capability)
    for cuda in ("12.8", None):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(ValueError, match=f"for CUDA {cuda}: .*12.9"):
            fp8_gemm.require_backend(backend, (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    for triton in ("3.9.0", "3.10.0", "0.0 (not installed)"):
        monkeypatch.setattr(fp8_gemm, "_installed", lambda package, triton=triton: triton)
        if backend == "torchao":
            with pytest.raises(ValueError, match="with triton .*3.9"):
                fp8_gemm.require_backend(backend, (9, 0))
        else:
            fp8_gemm.require_backend(backend, (9, 0))


def test_fake_quant_runs_anywhere_and_others_are_unknown():
    for capability in (None, (8, 9), (9, 0), (12, 0)):
        fp8_gemm.require_backend("fake_quant", capability)
    with pytest.raises(ValueError, match="fp8_gemm_backend='deepgemm' is not a GEMM backend"):
        fp8_gemm.require_backend("deepgemm", (9, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    "flow",
    [
        FP8Flow(backend="scaled_mm"),
        FP8Flow(backward="fp8", scale_format="fp32", activation=ActivationScaling("fp32"), backend="torchao"),
    ],
)
def test_installation_on_cpu_refuses_gpu_backends_and_leaves_the_model(flow):
    model = Wrapped(256, 128)
    with pytest.raises(ValueError, match=f"fp8_gemm_backend='{flow.backend}' on CPU"):
        installed(model, flow)
    assert type(model.layer) is torch.nn.Linear


def on_cuda(flow, lead, columns, rows, dtype=torch.bfloat16, bias=True):
    """(y, dX, dW) in float64; weights and inputs are BF16 numbers in every dtype, so that all see the same ones."""
    model = Wrapped(columns, rows, bias).bfloat16().to("cuda", dtype)
    installed(model, flow)
    x, dy = (tensor.detach().cuda().to(dtype) for tensor in inputs(lead, columns, rows, dtype=torch.bfloat16))
    y = model(x.requires_grad_())
    y.backward(dy)
    return y.detach().double(), x.grad.double(), model.layer.weight.grad.double()


def relative(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


# Two BF16 roundings of nearly the same number, each at most 2**-8 of it. Hopper's FP8 tensor cores keep 13 bits below
# the largest product of an instruction (arXiv 2412.19437, section 3.3.2) and add 128-element partial sums in FP32,
# which is well below a BF16 step. A wrong scale, even of one block, is a factor of 2 there: far above.
CLOSE = 2**-8


@pytest.mark.parametrize("lead, columns, rows", [((3, 25), 256, 384), ((512,), 1024, 640), ((40,), 200, 130)])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("backward", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestScaledMMOnHopper:
    pytestmark = on_hopper

    def test_equals_fake_quant(self, lead, columns, rows, scale_format, backward, dtype):
        flow = FP8Flow(
            "full",
            backward,
            scale_format=scale_format,
            activation=ActivationScaling(scale_format),
            backend="scaled_mm",
        )
        got = on_cuda(flow, lead, columns, rows, dtype)
        # FP32 operands keep either format (torch's default float32 matmul precision, no TF32)
        flow = FP8Flow("full", backward, scale_format=scale_format, activation=ActivationScaling(scale_format))
        expected = on_cuda(flow, lead, columns, rows, torch.float32)
        for name, a, b in zip(("y", "dx", "dw"), got, expected, strict=True):
            assert relative(a, b) < CLOSE, name


@pytest.mark.parametrize("lead", [(4, 128), (3, 25)])
@pytest.mark.parametrize("bias", [True, False])
class TestTorchaoOnHopper:
    pytestmark = on_hopper

    def test_equals_fake_quant(self, lead, bias):
        # torchao quantizes X for the weight gradient once, from BF16, and not from the forward's codes: dW differs by
        # one more e4m3 rounding of X (at most 1/16, on average about 0.026 of its norm); its scales differ by an ulp
        got = on_cuda(
            FP8Flow("full", "fp8", scale_format="fp32", activation=ActivationScaling("fp32"), backend="torchao"),
            lead,
            256,
            384,
            bias=bias,
        )
        expected = on_cuda(
            FP8Flow("full", "fp8", scale_format="fp32", activation=ActivationScaling("fp32")),
            lead,
            256,
            384,
            torch.float32,
            bias,
        )
        assert relative(got[0], expected[0]) < 2 * CLOSE  # a few codes flip with the scale's last bit
        assert relative(got[1], expected[1]) < 2 * CLOSE
        assert 2 * CLOSE < relative(got[2], expected[2]) < 0.0625
