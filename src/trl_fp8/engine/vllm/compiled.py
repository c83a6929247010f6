"""What of ours a compiled engine runs, told to vLLM's compile cache.

vLLM looks for compiled code under a hash of its environment variables, its config and the model's class, and does not
trace the model again where it finds some. Kernels and layers of ours that are registered in place of vLLM's change
what is traced and stand in none of these. `additional_config` is hashed, and of this entry nobody reads anything. A
part that changes what is traced adds to the entry.
"""

import hashlib
from functools import cache
from pathlib import Path


ENTRY = "trl_fp8"


def traced(**further: object) -> dict[str, dict]:
    """`additional_config` for `vllm.LLM(...)`; `further`: what else of this run the traced code depends on."""
    return {ENTRY: {"source": _source(), **further}}


@cache
def _source() -> str:
    """Digest of this package: another version of it, or an edited one, may trace something else."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
