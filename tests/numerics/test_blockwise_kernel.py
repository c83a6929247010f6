"""The Triton kernel without a GPU: its results in Triton's interpreter, and the instructions that Hopper would run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trl_fp8.numerics import blockwise_kernel
from trl_fp8.numerics.blockwise import _quantize_by_torch
from trl_fp8.numerics.blockwise_kernel import ROWS, _quantize
from trl_fp8.numerics.e4m3 import E4M3


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
    poisoned[5, 7], poisoned[129, 290], poisoned[64, 200] = torch.nan, torch.inf, -torch.inf
    return made | {"dead": dead, "poisoned": poisoned, "transposed": poisoned.t(), "every second": dead[:, ::2]}


def differences(quantize):
    """The examples for which `quantize` gives other codes or scales than torch's operations."""
    found = []
    for name, values in examples().items():
        for case in CASES:
            codes, scale = _quantize_by_torch(values, (128, 128) if case[0] else (128,), *case[1:])
            their_codes, their_scale = (result.cpu() for result in quantize(values, *case))
            same_codes = torch.equal(codes.float().nan_to_num(999), their_codes.to(E4M3).float().nan_to_num(999))
            if not (same_codes and torch.equal(scale.nan_to_num(7), their_scale.nan_to_num(7))):
                found.append((name, *case))
    return found


def interpreted_differences():
    """`differences` of the kernel in Triton's interpreter.

    Its cast to e4m3 does not round to nearest even, so the kernel stores what it would cast; the cast itself is one
    instruction, see below.
    """
    blockwise_kernel.E4M3 = torch.float32
    return differences(blockwise_kernel.quantize_blocks)


def test_bytes_are_those_of_torch():
    # Triton's own functions are interpreted only if it was told so before it was imported
    done = subprocess.run(
        [sys.executable, "-c", "import test_blockwise_kernel as test; print(test.interpreted_differences())"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr[-3000:]


@pytest.mark.gpu
def test_bytes_on_a_gpu_are_those_on_cpu():
    assert differences(lambda values, *case: blockwise_kernel.quantize_blocks(values.cuda(), *case)) == []


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled(square, pow2)` -> PTX for Hopper of the kernel that reads an aligned BF16 matrix."""

    def compile_(square, pow2):
        constants = {"SQUARE": square, "POW2": pow2, "HEIGHT": 128 if square else ROWS, "WIDTH": 128, "LIMIT": 448.0}
        constants["column_stride"] = 1
        signature = dict.fromkeys(_quantize.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
        signature |= {"values": "*bf16", "codes": "*fp8e4nv", "scale": "*fp32", "amax_floor": "fp32"}
        aligned = ("values", "codes", "scale", "rows", "columns", "matrix_stride", "row_stride")
        attributes = {(_quantize.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(fn=_quantize, signature=signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": 8 if square else 4}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield compile_


@pytest.mark.parametrize("square", [True, False], ids=["blocks", "groups"])
@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "fp32"])
def test_hopper_divides_exactly_rounds_to_nearest_and_reads_16_bytes_at_a_time(compiled, square, pow2):
    ptx = compiled(square, pow2)
    per_thread = 128 * 128 // 256 if square else 32 * 128 // 128  # elements
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)) == per_thread // 2
    assert "div.full" not in ptx and "div.approx" not in ptx and "rcp.approx" not in ptx
    divisions = len(re.findall(r"div\.rn\.f32", ptx))
    assert divisions < 6 if pow2 else per_thread <= divisions < per_thread + 4
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == per_thread * 2 // 16
