"""The CUDA compiler, nvcc, for kernels that are compiled as they are called: DeepGEMM's."""

import os
import shutil
import sys

from accelerate.logging import get_logger


logger = get_logger(__name__)

TOOLKIT = "/usr/local/cuda"  # where DeepGEMM looks last
# pip's nvcc can be newer than the CUDA headers that torch pins beside it. CCCL refuses such a pair unless this is set;
# DeepGEMM's kernels compile with it
ANY_PAIR = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"


def find_nvcc() -> bool:
    """Return whether DeepGEMM finds nvcc. If pip's is the only one, set CUDA_HOME to its folder, for good.

    To be called before DeepGEMM is imported, which looks for nvcc then, and reads the flags at each compilation.
    """
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT)
    if any(shutil.which("nvcc", path=folder) for folder in (None, *(f"{home}/bin" for home in homes if home))):
        return True
    pips = [f"{folder}/nvidia/cu13" for folder in sys.path if shutil.which("nvcc", path=f"{folder}/nvidia/cu13/bin")]
    if pips:
        flags = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {ANY_PAIR}".strip()
        os.environ.update(CUDA_HOME=pips[0], NVCC_APPEND_FLAGS=flags)
        logger.info(f"DeepGEMM compiles with pip's nvcc: CUDA_HOME={pips[0]}, NVCC_APPEND_FLAGS={flags!r}")
    return bool(pips)
