"""The Triton kernels without a GPU: their results in Triton's interpreter,
and the instructions that Hopper would run.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from torchao.quantization import Float8Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trl_fp8.quantization import kernels
from trl_fp8.quantization.blockwise import _quantize_by_torch, dequantize_weight
from trl_fp8.quantization.digest import _P, _add_words_by_torch, digest
from trl_fp8.quantization.e4m3 import E4M3
from trl_fp8.quantization.kernels import (
    HEIGHT,
    ROWS,
    WIDTH,
    _add_words,
    _dequantize,
    _quantize,
    add_words,
    dequantize_blocks,
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


def dequantize_differences(dtypes, place=lambda tensor: tensor):
    """The examples, quantized, for which the kernel gives other values back than torch's operations."""
    found = []
    for name, values in examples().items():
        for square, *scaling in CASES:
            blocks = (128, 128) if square else (128,)
            codes, scale = _quantize_by_torch(values.nan_to_num(3.0, 3.0, -3.0), blocks, *scaling)
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


def digest_differences(device="cpu"):
    """The matrices of words for which the kernel adds another sum than torch's operations."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for shape in [(1, 1), (7, 5), (32, 256), (100, 700), (1, 9000), (5000, 3), (40, 1)]:
        words = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        expected, total = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64, device=device)
        for first_row in (0, 12345):  # the second adds to the first
            _add_words_by_torch(expected, words, first_row)
            add_words(total, words.to(device), first_row, _P)
        if expected != total.cpu():
            found.append(shape)
    return found


def interpreted():
    """What the kernels do otherwise than torch in Triton's interpreter.

    Its casts do not round to nearest even, so the kernels store what they would cast;
    a cast itself is one instruction, see below.
    """
    kernels.E4M3 = torch.float32
    return {
        "quantize": differences(kernels.quantize_blocks),
        "dequantize": dequantize_differences([torch.float32]),
        "digest": digest_differences(),
    }


def test_results_are_those_of_torch():
    # Triton's own functions are interpreted only if it was told so before it was imported
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json; from tests.quantization import test_kernels; print(json.dumps(test_kernels.interpreted()))",
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"quantize": [], "dequantize": [], "digest": []}


@pytest.mark.gpu
def test_results_on_a_gpu_are_those_on_cpu():
    assert differences(lambda values, *case: kernels.quantize_blocks(values.cuda(), *case)) == []
    assert dequantize_differences([torch.float32, torch.bfloat16, torch.float16], lambda tensor: tensor.cuda()) == []
    assert digest_differences("cuda") == []
    weight = torch.randn(3000, 4000)
    for tensor in (weight, weight.bfloat16(), weight.t(), weight[:, 1:], weight[0, :3].to(E4M3)):
        assert digest(tensor.cuda()).cpu() == digest(tensor)
        assert digest(tensor.cuda(), torch.bfloat16).cpu() == digest(tensor, torch.bfloat16)


@pytest.fixture
def ptx(tmp_path, monkeypatch):
    """`ptx(kernel, types, constants, warps)` -> its PTX for Hopper;
    pointers and types "... 16" are multiples of 16.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_(kernel, types, constants, warps):
        names = kernel.arg_names
        aligned = [n for n, kind in types.items() if kind.startswith("*") or kind.endswith("16")]
        signature = {name: types.get(name, "i32").removesuffix(" 16") for name in names}
        source = ASTSource(
            fn=kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]

    return compile_


@pytest.mark.parametrize("square", [True, False], ids=["blocks", "groups"])
@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "fp32"])
def test_hopper_divides_exactly_rounds_to_nearest_and_reads_16_bytes_at_a_time(ptx, square, pow2):
    types = dict.fromkeys(("rows", "columns", "matrix_stride", "row_stride"), "i32 16")
    types |= {"values": "*bf16", "codes": "*fp8e4nv", "scale": "*fp32", "amax_floor": "fp32"}
    height, warps = (128, 8) if square else (ROWS, 4)
    constants = {"SQUARE": square, "POW2": pow2, "HEIGHT": height, "WIDTH": 128, "LIMIT": 448.0, "column_stride": 1}
    text = ptx(_quantize, types, constants, warps)
    per_thread = height * 128 // (32 * warps)  # elements
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", text)) == per_thread // 2
    assert not re.search(r"div\.full|div\.approx|rcp\.approx", text)
    divisions = len(re.findall(r"div\.rn\.f32", text))
    assert divisions < 6 if pow2 else per_thread <= divisions < per_thread + 4
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == per_thread * 2 // 16


@pytest.mark.parametrize("square", [True, False], ids=["blocks", "groups"])
def test_hopper_rounds_dequantized_values_to_nearest(ptx, square):
    types = dict.fromkeys(("rows", "columns", "matrix_stride", "row_stride"), "i32 16")
    types |= {"codes": "*fp8e4nv", "scale": "*fp32", "values": "*bf16"}
    constants = {"SQUARE": square, "HEIGHT": ROWS, "WIDTH": 128, "column_stride": 1, "scale_column_stride": 1}
    text = ptx(_dequantize, types, constants, 4)
    per_thread = ROWS * 128 // 128
    assert len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", text)) == per_thread // 2
    assert len(re.findall(r"cvt\.rn\.bf16x2\.f32", text)) == per_thread // 2
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) >= per_thread // 16


def test_hopper_adds_a_program_to_the_checksum_at_once(ptx):
    types = {"total": "*i64", "words": "*i32", "rows": "i32 16", "columns": "i32 16", "column_step": "i64"}
    text = ptx(_add_words, types, {"HEIGHT": HEIGHT, "WIDTH": WIDTH}, 4)
    assert len(re.findall(r"atom\.\S*add\.u64", text)) == 1
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == HEIGHT * WIDTH // 128 // 4
