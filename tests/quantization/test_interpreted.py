"""Results of the Triton kernels in Triton's interpreter are those of torch's operations, bit for bit.

One process computes all of them: importing torch and Triton anew takes as long as many kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


EXPECTED = {  # test module -> what its `interpreted()` returns
    "test_kernels": {
        "quantize": [],
        "parts": [],
        "dequantize": [],
        "far apart": True,
        "kernel check": [],
        "launches": [1, True],
    },
    "test_checksums": {"held": [], "sent": [], "parts": True, "far apart": True, "launches": [1, 9]},
    "test_cache_kernels": {"magnitudes": [], "round trips": [], "shapes and scales": []},
}


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-m", "tests.quantization.interpreted", *EXPECTED],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", EXPECTED)
def test_results_are_those_of_torch(module, found):
    assert found[module] == EXPECTED[module]
