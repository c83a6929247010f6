"""GEMM backends: layouts and padding against torch's own checks on CPU; the kernels themselves on a Hopper GPU.

Run the second half with `pytest -m gpu`; it was written without a GPU at hand and has not been run.
"""

import pytest
import torch
from torch.nn.functional import ScalingType, scaled_mm

from testing.fp8_oracle import gamma
from testing.linears import gradients, inputs, pair
from trl_fp8.features.one_forward import followed_linear as fp8_gemm
from trl_fp8.features.one_forward.followed_linear import BackwardPrecision
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_activation, quantize_weight


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
    """Compute as cuBLASLt does, by its documented layouts; torch checks shapes and strides on the meta device.

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
    got = fp8_gemm.scaled_mm_gemm(a, b)
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


@pytest.mark.parametrize("lead, columns, rows", [((3, 25), 256, 384), ((40,), 200, 130)])
def test_a_layer_on_scaled_mm_is_the_layer_on_fake_quant(lead, columns, rows, monkeypatch):
    monkeypatch.setattr(fp8_gemm.F, "scaled_mm", emulated_scaled_mm)
    x, dy = inputs(lead, columns, rows)
    precisions = [BackwardPrecision("fp8", backend=backend) for backend in ("fake_quant", "scaled_mm")]
    (y, dx, dw, db), (other_y, other_dx, other_dw, other_db) = (
        gradients(pair(columns, rows, precision)[1], x, dy) for precision in precisions
    )
    assert torch.equal(y, other_y) and torch.equal(db, other_db)
    for expected, got in ((dx, other_dx), (dw, other_dw)):
        assert got.dtype == expected.dtype
        # scaled_mm's results are BF16; sums that cancel are off by the FP32 accumulation of their terms instead
        assert ((got - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * expected.abs().max()).all()


@pytest.mark.parametrize("tokens, columns, rows", SHAPES)
def test_bf16_operands_are_exact_with_pow2_scales_only(tokens, columns, rows):
    """On CUDA fake_quant multiplies in BF16."""
    for scale_format in ("pow2", "fp32"):
        x, w, _ = operands(tokens, columns, rows)
        a, b = quantize_activation(x, scale_format), quantize_weight(w, scale_format)
        exact = dequantize_weight(a, torch.float64) @ dequantize_weight(b, torch.float64).T
        left, right = dequantize_weight(a, torch.bfloat16).double(), dequantize_weight(b, torch.bfloat16).double()
        if scale_format == "pow2":
            assert torch.equal(left @ right.T, exact)
        else:
            assert (left @ right.T - exact).norm() > 1e-4 * exact.norm()
        on_cpu = BackwardPrecision().gemm(a, b).double()  # FP32 operands in either format
        terms = dequantize_weight(a, torch.float64).abs() @ dequantize_weight(b, torch.float64).abs().T
        assert ((on_cpu - exact).abs() <= gamma(columns) * terms).all()


def test_a_backend_that_cannot_run_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fp8_gemm.require_backend("scaled_mm", (9, 0))
    with pytest.raises(ValueError, match="fp8_gemm_backend='scaled_mm' on CPU: .*Hopper.*'fake_quant'"):
        fp8_gemm.require_backend("scaled_mm", None)
    for capability in ((8, 9), (10, 0), (12, 0)):
        with pytest.raises(ValueError, match=r"on compute capability {}\.{}: ".format(*capability)):
            fp8_gemm.require_backend("scaled_mm", capability)
    for cuda in ("12.8", None):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(ValueError, match=f"for CUDA {cuda}: .*12.9"):
            fp8_gemm.require_backend("scaled_mm", (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    fp8_gemm.require_backend("scaled_mm", (9, 0))


def test_fake_quant_runs_anywhere():
    for capability in (None, (8, 9), (9, 0), (12, 0)):
        fp8_gemm.require_backend("fake_quant", capability)


# Two BF16 roundings of nearly the same number, each at most 2**-8 of it. Hopper's FP8 tensor cores keep 13 bits below
# the largest product of an instruction (arXiv 2412.19437, section 3.3.2) and add 128-element partial sums in FP32,
# which is well below a BF16 step. A wrong scale, even of one block, is a factor of 2 there: far above.
CLOSE = 2**-8


@pytest.mark.parametrize("tokens, columns, rows", [(75, 256, 384), (512, 1024, 640), (40, 200, 130)])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("square", [True, False])
class TestScaledMMOnHopper:
    pytestmark = on_hopper

    def test_equals_the_definition(self, tokens, columns, rows, scale_format, square):
        x, w, _ = (one.cuda() if isinstance(one, torch.Tensor) else one for one in operands(tokens, columns, rows))
        a = quantize_activation(x, scale_format)
        b = quantize_weight(w, scale_format) if square else quantize_activation(w, scale_format)
        exact = dequantize_weight(a, torch.float64) @ dequantize_weight(b, torch.float64).T
        assert (fp8_gemm.scaled_mm_gemm(a, b).double() - exact).norm() < CLOSE * exact.norm()
