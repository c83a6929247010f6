"""The GPU dry run's own parts. The dry run itself needs vLLM's CUDA build (gpu/README.md)."""

import ctypes
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest

from gpu import dry_run, pretended_gpu
from gpu.dry_run import FOLLOWED, OWN, PINNED, Found


ROOT = Path(__file__).parents[1]


def rows(markdown, table):
    lines = markdown.split("\n\n")[table].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_a_problem_stands_in_the_table_before_what_went_well():
    fine = Found("a", "9.0", PINNED, kernels={"K": 4}, held=7, calls={"_C::f": [{"x": "bf16[2]"}], "triton::g": [{}]})
    broken = Found("a", "9.0", FOLLOWED, kernels={"K": 4}, problems=["decoding: wrong | argument. More.", "another"])
    refused = Found("a", "8.0", PINNED, refused=["engine arguments: no FP8 units. Older ..."])
    markdown = dry_run.tables([asdict(each) for each in (fine, broken, refused)])
    pinned = rows(markdown, 0)
    assert pinned[0][-1] == "auditable; 7 tensors sent and held; 1 operators answer, 1 Triton kernels compile"
    assert pinned[1][2] == "on" and pinned[1][-1] == "**decoding: wrong \\| argument** (and 1 more)"
    assert pinned[2][-1] == "refused: engine arguments: no FP8 units"
    assert rows(markdown, 2) == [["`_C::f`", "9.0", "x bf16[2]"], ["`triton::g`", "9.0", ""]]


def test_what_vllm_would_choose_stands_with_what_is_said_to_it():
    own = Found(
        "a", "12.0", OWN, kernels={"DeepGemm": 4}, attention={"FlashInferImpl": 2}, refused=["repacks", "copies"]
    )
    markdown = dry_run.tables([asdict(own)])
    assert rows(markdown, 0) == []
    assert rows(markdown, 1) == [["a", "12.0", "4 `DeepGemm`", "2 `FlashInferImpl`", "repacks; copies"]]


def test_other_families_stand_in_a_table_of_their_own():
    found = Found("phi-4", "9.0", PINNED, kernels={"K": 4}, held=7, not_followed=["prompts"])
    markdown = dry_run.tables([asdict(found)])
    assert rows(markdown, 0) == rows(markdown, 2) == []
    assert rows(markdown, 3)[0][-1] == "auditable; 7 tensors sent and held; 0 operators answer; not followed: prompts"


def test_the_page_shows_every_gpu_shape_and_flow():
    page = (ROOT / "gpu" / "NOTES.md").read_text()
    for (major, minor), model, flow in product(pretended_gpu.GPUS, dry_run.SHAPES, ("off", "on")):
        assert f"\n| {model} | {major}.{minor} | {flow} | " in page


SCALED = {dry_run.QUANTIZE: [{"scale_ue8m0": "False"}]}
TILE = dict.fromkeys(("M", "N", "K", *dry_run.TILE), "4")
SHARED = dict.fromkeys([*dry_run.SHARED, dry_run.SILU], [TILE])
FLASH = {"max_seqlen_q": "256", "max_seqlen_k": "4096", "num_splits": "1", "scheduler_metadata": "None"}


@pytest.mark.parametrize(
    ("choice", "scales", "calls", "wrong"),
    [
        (PINNED, ["fp32"], SCALED, []),
        (PINNED, ["fp32", "pow2"], SCALED, ["scale_ue8m0=['False']"]),
        (PINNED, ["fp32"], SCALED | {dry_run.FUSED_SILU: [{}]}, ["in the calls: True"]),
        (FOLLOWED, ["fp32"], SCALED | SHARED, []),
        (FOLLOWED, ["fp32"], SCALED | SHARED | {"_C::rms_norm": [{}]}, ["_C::rms_norm was called"]),
        (FOLLOWED, ["fp32"], SCALED | SHARED | {dry_run.FLASH: [FLASH, FLASH]}, []),
        (
            FOLLOWED,
            ["fp32"],
            SCALED | SHARED | {dry_run.FLASH: [FLASH, FLASH | {"max_seqlen_q": "1"}]},
            ["FlashAttention is called in 2 ways"],
        ),
        (
            FOLLOWED,
            ["fp32"],
            SCALED | {name: [TILE] for name in SHARED if "rotary" not in name},
            ["rotary_embedding was"],
        ),
        (FOLLOWED, ["fp32"], SCALED | {name: [TILE] for name in dry_run.SHARED}, ["silu_and_mul was not called"]),
        (
            FOLLOWED,
            ["fp32"],
            SCALED | SHARED | {dry_run.UNQUANTIZED: [TILE, TILE | {"M": "1"}, TILE | {"num_warps": "8"}]},
            ["come in 2 tiles"],
        ),
    ],
)
def test_calls_that_a_trainer_does_not_follow_are_problems(choice, scales, calls, wrong):
    found = dry_run._contradictions(Found("a", "9.0", choice, scales=scales, calls=calls))
    assert len(found) == len(wrong) and all(part in problem for part, problem in zip(wrong, found, strict=True))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_stub_driver_loads_and_finds_no_device(tmp_path, monkeypatch):
    load = ctypes.CDLL

    def no_driver(name):
        raise OSError(name)

    monkeypatch.setattr(pretended_gpu.ctypes, "CDLL", no_driver)
    monkeypatch.setenv("LD_LIBRARY_PATH", "elsewhere")
    assert pretended_gpu.driver_environment(tmp_path) == {"LD_LIBRARY_PATH": f"{tmp_path}:elsewhere"}
    stub = load(str(tmp_path / "libcuda.so.1"))
    assert stub.cuGetProcAddress_v2() == pretended_gpu.NO_DEVICE
