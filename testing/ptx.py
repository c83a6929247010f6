"""A Triton kernel as NVIDIA GPUs would run it, compiled without one."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Compiled:
    """`text` is the PTX; `local_bytes` what a thread keeps in memory because its `registers` did not suffice."""

    text: str
    registers: int
    local_bytes: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.text))


def compiled(
    kernel, types: dict[str, str], constants: dict, capability: int, folder: Path, warps: int = 4
) -> Compiled:
    """Compile `kernel` for a compute capability (90) with `constants`; other arguments are i32 or of `types`.

    Pointers, and types that end in " 16", are multiples of 16. `folder` holds the machine code.
    """
    names = kernel.arg_names
    aligned = [name for name, kind in types.items() if kind.startswith("*") or kind.endswith("16")]
    signature = {name: types.get(name, "i32").removesuffix(" 16") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm
    (folder / "cubin").write_bytes(code["cubin"])
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    dump = [tool, "--dump-resource-usage", folder / "cubin"]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage).groups())
    return Compiled(code["ptx"], registers, stack + local)
