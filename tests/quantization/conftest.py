"""What a GPU would run of a Triton kernel."""

import pytest

from testing import ptx as gpu


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """`compiled(kernel, types, constants, warps, arch)` -> its PTX, registers of a thread, bytes beyond them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_(kernel, types, constants, warps, arch=90):
        code = gpu.compiled(kernel, types, constants, arch, tmp_path, warps)
        return code.text, code.registers, code.local_bytes

    return compile_


@pytest.fixture
def ptx(compiled):
    """`ptx(kernel, types, constants, warps)` -> its PTX for Hopper."""
    return lambda *kernel: compiled(*kernel)[0]
