"""Triton's interpreter, which runs kernels on tensors of the CPU: in a process of its own, with torch's casts.

    python -m tests.quantization.interpreted MODULE ...

writes what `interpreted()` of each test module returns, by name, as a line of JSON. Run it with TRITON_INTERPRET=1:
Triton reads that when it is imported, for its own functions too.
"""

import json
import sys
from importlib import import_module

import numpy as np
import torch


def cast_as_torch() -> None:
    """Let the interpreter round to nearest even, as the instructions do; its own casts cut off."""
    from triton import language as tl
    from triton.runtime import interpreter

    types = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }

    def convert(data, source, target, rounding_mode):
        words = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8).view(types[source.scalar])
        cast = words.to(types[target.scalar])
        return np.frombuffer(cast.view(torch.uint8).numpy().tobytes(), f"u{cast.itemsize}").reshape(data.shape)

    interpreter._convert_float = convert


class Launches:
    """In place of a kernel: counts how often it is launched."""

    def __init__(self, kernel):
        self.kernel, self.count = kernel, 0

    def __getitem__(self, grid):
        self.count += 1
        return self.kernel[grid]


if __name__ == "__main__":
    cast_as_torch()
    found = {name: import_module(f"tests.quantization.{name}").interpreted() for name in sys.argv[1:]}
    sys.stdout.write(f"{json.dumps(found)}\n")
