"""The formats of FP8 weights, one file each, by the value of the flag fp8_weight_format. Imports no torch."""

from .blocks import BLOCKS
from .spec import FormatSpec
from .tensor import TENSOR


FORMATS: dict[str, FormatSpec] = {spec.name: spec for spec in (BLOCKS, TENSOR)}


def format_named(name: str) -> FormatSpec:
    if name not in FORMATS:
        raise ValueError(f"fp8_weight_format={name!r} is not a format of weights. Use one of {list(FORMATS)}.")
    return FORMATS[name]
