"""The Triton kernels without a GPU: their results in Triton's interpreter,
and the instructions that Hopper would run.
"""

import re

import pytest
import torch
from torchao.quantization import Float8Tensor

from tests.quantization.interpreted import Launches
from trl_fp8.quantization.codec import blockwise, e4m3, kernel_check
from trl_fp8.quantization.codec.blockwise import dequantize_weight, quantize_activation, quantize_weight
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.kernels import block_kernels as kernels
from trl_fp8.quantization.kernels.block_kernels import (
    ROWS,
    WARPS,
    _dequantize,
    _quantize,
    block_warps,
    dequantize_blocks,
    quantize_blocks,
)


SHAPES = {
    torch.bfloat16: [(128, 256), (130, 300), (3, 40, 260), (33, 128), (1, 1)],
    torch.float32: [(130, 300), (1, 1)],
    torch.float16: [(3, 40, 260)],
}
CASES = [(square, *scaling) for square in (True, False) for scaling in (("pow2", 1e-12), ("fp32", 1e-10))]


def examples():
    """Name -> input: every magnitude from subnormals on, ragged and strided, dead and poisoned blocks."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for dtype, shapes in SHAPES.items():
        for shape in shapes:
            exponents = torch.randint(-12, 8, shape, generator=generator).float()
            values = torch.randn(shape, generator=generator) * torch.exp2(exponents)
            values.view(-1)[0] = 1.75  # amax / 448 is a power of two
            made[f"{dtype} {shape}"] = values.to(dtype)
    dead, poisoned = made["torch.bfloat16 (130, 300)"].clone(), made["torch.float32 (130, 300)"].clone()
    dead[128:], dead[:, :128] = 0, 1e-38
    poisoned[5, 7], poisoned[129, 290], poisoned[64, 200] = torch.inf, torch.nan, -torch.inf
    made |= {"dead": dead, "poisoned": poisoned, "transposed": poisoned.t(), "every second": dead[:, ::2]}
    made["negative zeros"] = torch.where(dead == 0, -0.0, dead)
    made["rounds to infinity"] = torch.full((3, 5), torch.finfo(torch.float32).max)
    quarters = made["torch.float16 (3, 40, 260)"].unflatten(1, (4, -1))
    made["leading dims of two strides"] = quarters[:, :3]  # a kernel reads a copy
    experts = made["torch.float16 (3, 40, 260)"].repeat(2, 1, 1)
    return made | {"halves": experts.unflatten(1, (2, -1))[:, :, 4:16]}  # of gate and up projection, one rank's rows


def a_part_of_a_larger_one(shape, dtype, device):
    """A view of `shape` within a tensor of ones, and that tensor."""
    first, last = min(1, len(shape) - 1), 16 * (dtype == E4M3) + 1
    whole = torch.ones(shape[0] + 2 * first, *shape[1:-1], shape[-1] + 2 * last, device=device).to(dtype)
    return whole[first : first + shape[0], ..., last : last + shape[-1]], whole


def quantized(values, square, scale_format, amax_floor):
    """Codes and scales by torch's operations on CPU."""
    if square:
        made = quantize_weight(values, scale_format, amax_floor=amax_floor, check_finite=False)
    else:
        made = quantize_activation(values, scale_format, amax_floor=amax_floor)
    return made.qdata, made.scale


def same(found, expected):
    """Byte for byte, but for the sign of NaN."""
    bits = torch.uint8 if found.dtype == E4M3 else torch.int32
    found, nan = found.contiguous(), expected.isnan()
    return torch.equal(found.isnan(), nan) and torch.equal(
        found.view(bits)[~nan], expected.contiguous().view(bits)[~nan]
    )


def differences(device="cpu"):
    """The examples for which the kernel gives other codes, scales or checksums than torch's operations."""
    found = []
    for name, values in examples().items():
        for square, *scaling in CASES:
            for rounded in {False, values.dtype != torch.bfloat16}:
                source = values.bfloat16() if rounded else values
                expected = quantized(source, square, *scaling)
                places = [a_part_of_a_larger_one(part.shape, part.dtype, device) for part in expected]
                into = tuple(view for view, _ in places) if square else None
                sums = torch.tensor([5, 7], device=device) if square and values.shape[-1] % 4 == 0 else None
                options = {"round_to_bf16": rounded, "into": into, "sums": sums}
                results = [part.cpu() for part in quantize_blocks(values.to(device), square, *scaling, **options)]
                checks = {"results": all(map(same, results, expected))}
                if sums is not None:
                    checks["checksums"] = sums.tolist() == [digest(results[0]) + 5, digest(results[1]) + 7]
                if not rounded:
                    alone = [part.cpu() for part in quantize_blocks(values.to(device), square, *scaling)]
                    checks["results without checksums"] = all(map(same, alone, expected))
                found += [f"{what} of {name}, {square} {scaling}" for what, right in checks.items() if not right]
                for view, whole in places if into else ():
                    view.fill_(1.0)
                    if not (whole == 1).all():
                        found.append(f"{name}, {square} {scaling}: other bytes were written to")
    return found


def differences_of_parts(device="cpu"):
    """The tensors whose parts, as ranks hold them, do not add up to the checksums of the whole."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for shape, cut in [((300, 260), 128), ((300, 132), 128), ((300, 132), 256), ((3, 130, 260), 1), ((5, 40, 36), 3)]:
        whole = torch.randn(shape, generator=generator)
        codes, scale = quantized(whole, True, "pow2", 1e-12)
        sums = torch.zeros(2, dtype=torch.int64, device=device)
        into = torch.empty_like(codes, device=device), torch.empty_like(scale, device=device)
        scale_cut = -(-cut // 128) if len(shape) == 2 else cut
        for rows, scale_rows in ((slice(cut), slice(scale_cut)), (slice(cut, None), slice(scale_cut, None))):
            first = [codes[: rows.start or 0, ..., 0].numel(), scale[: scale_rows.start or 0, ..., 0].numel()]
            parts = into[0][rows], into[1][scale_rows]
            quantize_blocks(whole[rows].to(device), True, "pow2", 1e-12, into=parts, sums=sums, first_rows=first)
        same_codes = torch.equal(into[0].cpu().view(torch.uint8), codes.view(torch.uint8))
        if not same_codes or sums.tolist() != [digest(codes), digest(scale)]:
            found.append(shape)
    return found


def far_apart():
    """Does a matrix of two rows, 2 GiB apart, equal that of rows side by side?"""
    values = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    codes = torch.empty(2**31 + 4096, dtype=torch.uint8).view(E4M3).as_strided((2, 128), (2**31 + 512, 1))
    expected, _ = quantize_blocks(values, True, "pow2", 1e-12)
    return same(quantize_blocks(values, True, "pow2", 1e-12, into=(codes, torch.empty(1, 1)))[0], expected)


def launches():
    """Of a quantization with everything that it can be asked for, and of no rows."""
    counted = Launches(_quantize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_quantize", counted)
        sums = torch.zeros(2, dtype=torch.int64)
        quantize_blocks(torch.ones(4, 200, 300), True, "pow2", 1e-12, round_to_bf16=True, sums=sums)
        shapes = [tuple(part.shape) for part in quantize_blocks(torch.ones(0, 300), True, "pow2", 1e-12)]
    return counted.count, shapes == [(0, 300), (0, 3)]


def dequantize_differences(dtypes, place=lambda tensor: tensor):
    """The examples, quantized, for which the kernel gives other values back than torch's operations.

    With scales that are no powers of two: products with those are not exact.
    """
    found = []
    for name, values in examples().items():
        for square, *scaling in (case for case in CASES if "fp32" in case):
            blocks = (128, 128) if square else (128,)
            codes, scale = quantized(values.nan_to_num(3.0, 3.0, -3.0), square, *scaling)
            operands = {"": (codes, scale)}
            if values.dim() == 2 and square:  # what the gradient of an input multiplies with
                operands["transposed"] = codes.t(), scale.t()
            for view, (codes, scale) in operands.items():
                block_size = [1] * (codes.dim() - len(blocks)) + list(blocks)
                for dtype in dtypes:
                    expected = dequantize_weight(Float8Tensor(codes, scale, block_size=block_size), dtype)
                    if not torch.equal(expected, dequantize_blocks(place(codes), place(scale), square, dtype).cpu()):
                        found.append((name, view, square, *scaling))
    return found


def refused_by_the_kernel_check():
    """What the check at start finds wrong with the interpreter in place of a GPU."""
    sample = torch.randn(160, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = kernel_check.results(sample)
    with pytest.MonkeyPatch.context() as patch:
        for module in (blockwise, e4m3):
            patch.setattr(module, "casts_in_hardware", lambda device: True)
        found = kernel_check.results(sample)
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def interpreted():
    """See test_interpreted.py."""
    return {
        "quantize": differences(),
        "parts": differences_of_parts(),
        "dequantize": dequantize_differences([torch.float32, torch.bfloat16]),
        "far apart": far_apart(),
        "kernel check": refused_by_the_kernel_check(),
        "launches": launches(),
    }


@pytest.mark.gpu
def test_results_on_a_gpu_are_those_on_cpu():
    assert differences("cuda") == []
    assert differences_of_parts("cuda") == []
    assert dequantize_differences([torch.float32, torch.bfloat16, torch.float16], lambda tensor: tensor.cuda()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_warps_change_no_bit_on_a_gpu(dtype):
    values = torch.randn(300, 516, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    found = []
    for warps in WARPS:
        sums = torch.zeros(2, dtype=torch.int64, device="cuda")
        parts = quantize_blocks(values, True, "pow2", 1e-12, sums=sums, warps=warps)
        found.append([part.view(torch.uint8) for part in (*parts, sums)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("faster", WARPS)
def test_square_blocks_are_quantized_with_the_warps_that_a_device_is_faster_with(faster, monkeypatch):
    """Timed once for each device and dtype. Groups in a row, and CPU, have one number of warps."""
    timed, device = [], torch.device("meta")  # plays the GPU

    def do_bench(call, *_, **__):
        timed.append((call.args[0].dtype, call.keywords["warps"]))
        return 1.0 if call.keywords["warps"] == faster else 2.0

    block_warps.cache_clear()
    monkeypatch.setattr(kernels, "do_bench", do_bench)
    for _ in range(2):
        assert block_warps(device, torch.float32) == faster
    assert timed == [(torch.float32, warps) for warps in WARPS]
    assert block_warps(torch.device("cpu"), torch.float32) == WARPS[0] and len(timed) == len(WARPS)
    block_warps.cache_clear()

    launched = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *_, num_warps, **__: launched.append(num_warps)

    monkeypatch.setattr(kernels, "_quantize", Launched())
    monkeypatch.setattr(kernels, "block_warps", lambda *_: faster)
    quantize_blocks(torch.ones(256, 256), True, "pow2", 1e-12)
    quantize_blocks(torch.ones(256, 256), True, "pow2", 1e-12, warps=3)
    quantize_blocks(torch.ones(256, 256), False, "pow2", 1e-12)
    assert launched == [faster, 3, 4]


@pytest.mark.parametrize(
    ("codes", "scale", "message"),
    [
        (
            torch.empty(4, 130, 256).to(E4M3),
            torch.empty(4, 2, 1),
            r"scales are to be written into torch.float32 \(4, 2",
        ),
        (torch.empty(4, 130, 256), torch.empty(4, 2, 2), "codes are to be written into torch.float32"),
        (
            torch.empty(2, 8, 130, 256).to(E4M3)[:, :2],
            torch.empty(2, 2, 2, 2),
            "leading dims cannot be merged into one",
        ),
    ],
)
def test_destinations_that_cannot_be_written_to_are_refused(codes, scale, message):
    with pytest.raises(ValueError, match=message):
        quantize_blocks(torch.ones(codes.shape), True, "pow2", 1e-12, into=(codes, scale))


def types_and_constants(dtype, square, pow2, columns, **options):
    types = dict.fromkeys(("rows", "matrix_stride", "row_stride", "code_matrix_stride", "code_row_stride"), "i32 16")
    types |= {"values": f"*{dtype}", "codes": "*fp8e4nv", "scales": "*fp32", "columns": columns, "amax_floor": "fp32"}
    options = {"sums": None, "BF16": False} | options
    types |= {name: kind for name, kind in options.items() if isinstance(kind, str)}
    constants = {"SQUARE": square, "POW2": pow2, "HEIGHT": 128 if square else ROWS, "WIDTH": 128, "LIMIT": 448.0}
    constants |= {"column_stride": 1, "code_column_stride": 1}
    return types, constants | {name: value for name, value in options.items() if name not in types}


@pytest.mark.parametrize(("square", "warps"), [(True, 8), (True, 16), (False, 4)], ids=str)
@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "fp32"])
def test_hopper_divides_exactly_rounds_to_nearest_and_reads_16_bytes_at_a_time(ptx, square, warps, pow2):
    height = 128 if square else ROWS
    text = ptx(_quantize, *types_and_constants("bf16", square, pow2, "i32 16"), warps)
    per_thread = height * 128 // (32 * warps)  # elements
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", text)) == per_thread // 2
    assert not re.search(r"div\.full|div\.approx|rcp\.approx", text)
    divisions = len(re.findall(r"div\.rn\.f32", text))
    assert divisions < 6 if pow2 else per_thread <= divisions < per_thread + 4
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == per_thread * 2 // 16
    assert len(re.findall(r"st\.global\.v[24]\.b32", text)) >= per_thread // 16
    assert re.findall(r"(?:atom|red)\.\S*global\S*", text) == []


@pytest.mark.parametrize("columns", ["i32 16", "i32"], ids=["whole blocks", "ragged"])
@pytest.mark.parametrize(("arch", "warps"), [(89, 8), (90, 8), (90, 16), (100, 16)], ids=str)
def test_sums_cost_a_relaxed_addition_each_and_no_spills(compiled, columns, arch, warps):
    types, constants = types_and_constants("fp32", True, False, columns, sums="*i64", BF16=True)
    text, registers, spilled = compiled(_quantize, types, constants, warps, arch)
    added = re.findall(r"(?:atom|red)\.\S*global\S*|membar\S*|fence\S*", text)
    assert added == ["red.global.gpu.relaxed.add.u64"] * 2
    assert re.search(r"cvt\.rn\.bf16", text)
    assert spilled == 0
    if columns == "i32 16":
        assert registers <= 128  # of 65536: 16 warps at once, in two blocks or in one


@pytest.mark.parametrize("square", [True, False], ids=["blocks", "groups"])
def test_hopper_rounds_dequantized_values_to_nearest(ptx, square):
    types = dict.fromkeys(("rows", "columns", "matrix_stride", "row_stride"), "i32 16")
    types |= {"codes": "*fp8e4nv", "scales": "*fp32", "values": "*bf16"}
    constants = {"SQUARE": square, "HEIGHT": ROWS, "WIDTH": 128, "column_stride": 1, "scale_column_stride": 1}
    text = ptx(_dequantize, types, constants, 4)
    per_thread = ROWS * 128 // 128
    assert len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", text)) == per_thread // 2
    assert len(re.findall(r"cvt\.rn\.bf16x2\.f32", text)) == per_thread // 2
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) >= per_thread // 16
