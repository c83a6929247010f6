"""The kernels over q, k and v without a GPU: their results in Triton's interpreter, and the instructions of GPUs."""

import pytest
import torch
import triton.language as tl

from testing.ptx import compiled
from trl_fp8.quantization.codec import kv_scales
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.kernels.cache_kernels import (
    ELEMENTS,
    _add_magnitudes,
    _round_trip,
    add_magnitudes,
    round_trip,
)


SHAPES = {
    torch.bfloat16: [(2, 3, 5, 24), (1, 1, 1, 1), (3, 2, 70, 128), (2, 1, 33, 80), (1, 2, 3, 192), (2, 2, 0, 8)],
    torch.float32: [(2, 1, 70, 64), (0, 2, 4, 8)],
    torch.float16: [(2, 3, 5, 24)],
}
LAYOUTS = {
    "contiguous": lambda states: states,
    "transposed": lambda states: states.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a fused projection": lambda states: torch.cat([states, states * 2], -1)[..., : states.shape[-1]],
    "every second channel": lambda states: states.repeat_interleave(2, -1)[..., ::2],
    "tokens beside each other": lambda states: states.mT.contiguous().mT,
    "one head for all": lambda states: states[:, :1].expand(states.shape),
}
LIMIT = 3.5  # 448 * 2**-7
SCALES = (2.0**-20, 2.0**-9, 1.0, 0.1, 1.75)  # under the last one BF16 has ties that a product with 1 / 1.75 breaks
CELLS = [(0, 1, True), (1, 2, False)]  # of `table`; whether what is beyond is counted


def examples(device="cpu"):
    """Name -> states: every dtype, shape and layout; poisoned, at the limit, of subnormal numbers and zeros."""
    generator, made = torch.Generator().manual_seed(0), {}
    for dtype, shapes in SHAPES.items():
        for shape in shapes:
            exponents = torch.randint(-6, 3, shape, generator=generator)
            states = (torch.randn(shape, generator=generator) * torch.exp2(exponents)).bfloat16().to(device, dtype)
            made |= {f"{dtype} {shape} {name}": make(states) for name, make in LAYOUTS.items()}
    poisoned = made["torch.bfloat16 (2, 1, 33, 80) transposed"].clone()
    poisoned[0, 0, 32, 3], poisoned[1, 0, 0, 79], poisoned[1, 0, 5, 5] = torch.nan, torch.inf, -torch.inf
    made |= {"NaN": poisoned, "infinite": poisoned.nan_to_num(0.0, torch.inf, -torch.inf)}
    made["at the limit"] = torch.tensor([3.5, -3.5, 3.515625, 0.0, -0.0], device=device).bfloat16().expand(2, 2, 4, 5)
    made["one beyond"] = torch.full((1, 1, 1, 1), 4.0, device=device)
    made["subnormal"] = torch.tensor([1e-45, -1e-40, 1e-38, -0.0], device=device).expand(1, 2, 3, 4)
    return made | {"zero": made["subnormal"] * -0.0}


def masks(batch, tokens):
    """Name -> which tokens are real; `left` and `right` have a row of padding only."""
    number, lengths = torch.arange(tokens), torch.arange(batch)[:, None] * 40 % 71
    return {
        "all": torch.ones((), dtype=torch.bool).expand(batch, tokens),
        "right": number < lengths,
        "left": (number >= tokens - lengths).t().contiguous().t(),
        "same for each": (number % 3 > 0).expand(batch, tokens),
        "none": torch.zeros(batch, tokens, dtype=torch.bool),
    }


def table():
    """amax, elements, limit and elements beyond it, `[2, 3]` each, as earlier calls left them."""
    amax, counts = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]), torch.arange(12, dtype=torch.float64)
    return amax, counts[:6].view(2, 3), torch.full((2, 3), LIMIT), counts[6:].view(2, 3)


def added(add, states, real_BT):
    """`table` after a call for each of `CELLS`."""
    made = [each.to(states.device) for each in table()]
    for row, column, counted in CELLS * bool(states.numel()):
        amax, elements, *limited = (each[row, column] for each in made)
        add(states, real_BT.to(states.device), amax, elements, *(limited if counted else (None, None)))
    return torch.stack([each.cpu().double() for each in made])


def same(left, right):
    """Equal bit for bit, but for the kind of NaN."""
    left, right = (torch.where(each.isnan(), 777.0, each.cpu().double()).view(torch.int64) for each in (left, right))
    return torch.equal(left, right)


def magnitude_differences(device="cpu"):
    """The examples for which the kernel gives other figures than torch's operations, or touches another cell."""
    found = []
    for number, (name, states) in enumerate(examples(device).items()):
        every = masks(states.shape[0], states.shape[2])
        for which in [list(every)[number // 2 % len(every)]] if name.startswith("torch") else every:
            expected = added(kv_scales.add_magnitudes, states.cpu(), every[which])
            if not same(added(add_magnitudes, states, every[which]), expected):
                found.append(f"{name}, {which}")
    return found


def by_torch(states, scale, codes=E4M3):
    """What a cache under `scale`, fp32, gives back; `codes` is the type that it holds."""
    scaled = states.cpu().bfloat16().float() / scale
    return (scaled.clamp(-448, 448).to(codes).float() * scale).to(states.dtype)


def round_trip_differences(cases):
    """The names of (name, states, scale) of which the kernel makes something else than torch's operations."""
    found = []
    for name, states, scale in cases:
        scale = torch.tensor(scale)
        result = round_trip(states, scale.to(states.device))
        dense = torch.empty_like(states).stride()
        if not same(result, by_torch(states, scale)) or result.stride() != dense:
            found.append(f"{name}, {scale}")
    return found


def cases(device="cpu"):
    """(name, states, scale): the examples and magnitudes of FP32, on CPU, where each takes long, under one of the
    scales; every number of BF16, and the codes with what is beyond them, under all.
    """
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(2, 3, 100, 64, generator=generator)
    wide *= torch.exp2(torch.randint(-140, 20, wide.shape, generator=generator))
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(1, 4, 128, 128)
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    codes = torch.cat([codes, torch.tensor([449.0, -1e4, torch.inf, -torch.inf])]).view(2, 2, 13, 5)
    made = examples() | {"wide": wide}
    for number, (name, states) in enumerate(made.items()):
        for scale in SCALES if device != "cpu" else SCALES[number % len(SCALES) :][:1]:
            yield name, states.to(device), scale
    for scale in SCALES:
        yield "codes", (codes * scale).to(device), scale
        yield "every", every.to(device), scale


def shapes_and_scales():
    """`round_trip` of other numbers of dims, and of scales in other forms."""
    found = []
    for shape in [(), (7,), (3, 5), (2, 3, 4)]:
        states = torch.linspace(-4, 4, 24)[: torch.Size(shape).numel()].view(shape).bfloat16().float()
        for scale in (0.1, torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64)):
            result = round_trip(states, scale)
            if not same(result, by_torch(states, torch.tensor(0.1))) or result.shape != shape:
                found.append(f"{shape}, {scale}")
    return found


def interpreted():
    """See test_interpreted.py."""
    return {
        "magnitudes": magnitude_differences(),
        "round trips": round_trip_differences(cases()),
        "shapes and scales": shapes_and_scales(),
    }


@pytest.mark.gpu
def test_results_on_a_gpu_are_those_on_cpu():
    assert magnitude_differences("cuda") == []
    assert round_trip_differences(cases("cuda")) == []


def test_a_scale_for_each_head_is_refused():
    with pytest.raises(RuntimeError, match="shape"):
        round_trip(torch.ones(1, 2, 3, 4), torch.ones(2))


TILE = {"HEIGHT": ELEMENTS // 128, "WIDTH": 128}
PER_THREAD = ELEMENTS // 128  # elements
STRIDES = dict.fromkeys(("batch_stride", "head_stride", "token_stride"), "i32 16")


@pytest.fixture
def compile_(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return lambda *args: compiled(*args, tmp_path)


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gpus_round_to_nearest_and_divide_exactly_in_a_round_trip(compile_, dtype, capability):
    types = STRIDES | {f"result_{name}": kind for name, kind in STRIDES.items()}
    types |= {"states": f"*{dtype}", "result": f"*{dtype}", "scale": "*fp32"}
    constants = {"channels": 128, "channel_stride": 1, "result_channel_stride": 1, "LIMIT": 448.0} | TILE
    code = compile_(_round_trip, types, constants | {"CODES": tl.float8e4nv}, capability)
    assert code.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") == PER_THREAD // 2
    assert code.count(r"cvt\.rn\.f16x2\.e4m3x2") == PER_THREAD // 2
    assert code.count(r"div\.rn\.f32") == PER_THREAD
    assert not code.count(r"div\.full|div\.approx|rcp|\.ftz")
    size = {"bf16": 2, "fp32": 4}[dtype]
    if dtype == "bf16":  # of the result
        assert code.count(r"cvt\.rn\.bf16x2\.f32") == PER_THREAD // 2
    else:  # of the input
        assert code.count(r"cvt\.rn\.bf16\.f32") == PER_THREAD
    assert code.count(r"ld\.global\.v4\.b32") == code.count(r"st\.global\.v4\.b32") == PER_THREAD * size // 16
    assert code.local_bytes == 0


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
def test_gpus_read_once_and_add_few_figures(compile_, counted, capability):
    types = STRIDES | {"states": "*bf16", "real": "*u8", "amax": "*i32", "elements": "*fp64"}
    types |= {"limit": "*fp32", "beyond": "*fp64"} if counted else {}
    constants = {"channels": 128, "channel_stride": 1, "real_token_stride": 1, "COUNT": counted} | TILE
    constants |= {} if counted else {"limit": None, "beyond": None}
    code = compile_(_add_magnitudes, types, constants, capability)
    assert code.count(r"ld\.global\.v4\.b32") == PER_THREAD * 2 // 16
    assert code.count(r"red\.global\.gpu\.relaxed\.max\.s32") == 1
    assert code.count(r"red\.global\.gpu\.relaxed\.add\.f64") == 1 + counted
    assert not code.count(r"atom\.|acq_rel|\.ftz")
    assert code.local_bytes == 0
