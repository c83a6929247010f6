"""torchvision on a CPU's torch: vLLM's classes of Qwen's vision-language models and of Qwen3.5 import it.

The wheel that registries have is built for CUDA, and its import ends at an operator that only its native library
defines. Here that operator is declared and never called: what resizes and normalizes images is written in torch.
"""

import sys
from pathlib import Path

import torch


FOLDER = Path(sys.prefix) / "torchvision"  # where `make models` installs it, out of sight of everything else
_DECLARED = []


def declare_operators() -> None:
    """Make torchvision, which stands in `FOLDER`, importable."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(library)  # it ends with its last reference
