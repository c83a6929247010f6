"""What a GPU would run of a Triton kernel."""

import re
import subprocess

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """`compiled(kernel, types, constants, warps, arch)` -> its PTX, registers of a thread, bytes spilled from them.

    Pointers, and types "... 16", are multiples of 16.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_(kernel, types, constants, warps, arch=90):
        names = kernel.arg_names
        aligned = [n for n, kind in types.items() if kind.startswith("*") or kind.endswith("16")]
        signature = {name: types.get(name, "i32").removesuffix(" 16") for name in names}
        source = ASTSource(
            fn=kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        text = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps}).asm["ptx"]
        file = tmp_path / "kernel.ptx"
        file.write_text(text)
        target = re.search(r"\.target (sm_\w+)", text)[1]
        # The first option is Triton's
        command = [get_ptxas(arch).path, "--regAllocOptLevel=2", "-v", f"--gpu-name={target}", file, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        return text, int(re.search(r"Used (\d+) registers", log)[1]), int(re.search(r"(\d+) bytes spill st", log)[1])

    return compile_


@pytest.fixture
def ptx(compiled):
    """`ptx(kernel, types, constants, warps)` -> its PTX for Hopper."""
    return lambda *kernel: compiled(*kernel)[0]
