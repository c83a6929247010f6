"""Which setting could mend a failure, by its log: a try costs minutes of a lease, and most failures no setting mends.

    python gpu/remedy.py LOG [SETTING ...]

Prints the setting that is made for what the log says, a variable or an option; prints nothing and fails if there is
none, or if it is among the SETTINGs that were in force.
"""

import re
import sys
from pathlib import Path


# Whatever else the log says
HOPELESS = re.compile(r"OutOfMemoryError|out of memory|No space left on device|no CUDA GPUs", re.IGNORECASE)


def raised_in(folder: str) -> str:
    """A traceback whose last frame is in a file of `folder`: a line for the frame, its code, the error."""
    frame = rf'File "[^"\n]*/{folder}/[^"\n]*", line \d+[^\n]*\n'
    return frame + r"(?: {4}[^\n]*\n)*\w[\w.]*(?:Error|Exception|Unsupported)\b"


# The first that fits is the one: torch.compile calls Triton, too
REMEDIES = {
    '--engine-kwargs={"compilation_config":{"mode":0}}': (
        r"^torch\._(?:dynamo|inductor)[\w.]*:",
        raised_in(r"torch/_(?:dynamo|inductor)"),
    ),
    "VLLM_USE_FLASHINFER_SAMPLER=0": (r"^\w[\w.]*Error: .*flashinfer", raised_in("flashinfer")),
    "VLLM_USE_V2_MODEL_RUNNER=0": (  # has Triton kernels for a newer Triton than that of torch 2.11
        r"^triton\.[\w.]*Error",
        r"^(?:Attribute|Import|Type)Error: .*\btriton\b",
        raised_in("triton"),
        raised_in("vllm/v1/worker/gpu"),
    ),
}


def remedy(log: str) -> str | None:
    """The setting that is made for what `log` says."""
    if HOPELESS.search(log):
        return None
    fitting = (name for name, signs in REMEDIES.items() if any(re.search(sign, log, re.MULTILINE) for sign in signs))
    return next(fitting, None)


def main(log: str, *in_force: str) -> int:
    found = remedy(Path(log).read_text(errors="replace"))
    if found is None or found in in_force:
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
