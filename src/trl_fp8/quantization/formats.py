"""What the formats are called and how large their blocks are: all that a plan needs to know, without
importing torch.
"""

from typing import Literal


BLOCK = 128  # side of a weight's block, and length of an activation's group
ScaleFormat = Literal["pow2", "fp32"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("pow2", "fp32")
