"""The GPU dry run's own parts. The dry run itself needs vLLM's CUDA build (gpu/README.md)."""

import ctypes
import shutil
from itertools import product
from pathlib import Path

import pytest

from gpu import dry_run, pretended_gpu


ROOT = Path(__file__).parents[1]


def test_the_page_shows_every_gpu_shape_and_flow():
    page = (ROOT / "gpu" / "NOTES.md").read_text()
    for (major, minor), model, flow in product(pretended_gpu.GPUS, dry_run.SHAPES, ("off", "on")):
        assert f"\n| {model} | {major}.{minor} | {flow} | " in page


TILE = dict.fromkeys(("M", "N", "K", *dry_run.TILE), "4")
SHARED = dict.fromkeys([*dry_run.SHARED, dry_run.SILU], [TILE])


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
