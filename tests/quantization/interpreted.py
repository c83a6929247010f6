"""Triton's interpreter, which runs kernels on tensors of the CPU: in a process of its own, with torch's casts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch


def results_of(module: str) -> dict:
    """What `interpreted()` of a test module returns where Triton interprets."""
    # Triton's own functions are interpreted only if it was told so before it was imported
    code = f"import json; from tests.quantization import {module} as tests; print(json.dumps(tests.interpreted()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


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
