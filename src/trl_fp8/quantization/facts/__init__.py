"""The numbers of formats, without torch. A format of FP8 weights is one file here and one entry of `FORMATS`."""

from collections.abc import Sequence

from .blocks import BLOCKS
from .spec import FormatSpec
from .tensor import TENSOR


FORMATS: dict[str, FormatSpec] = {spec.name: spec for spec in (BLOCKS, TENSOR)}  # by the flag fp8_weight_format


def format_named(name: str) -> FormatSpec:
    """The format of a value of the flag; `ValueError` if there is none."""
    if name not in FORMATS:
        raise ValueError(f"fp8_weight_format={name!r} is not a format of weights. Use one of {list(FORMATS)}.")
    return FORMATS[name]


def format_stored(weight_block: Sequence[int] | None) -> FormatSpec | None:
    """The format of a checkpoint, or of an engine's layer, by its `weight_block_size`; None if it is none of ours."""
    block = tuple(weight_block) if weight_block else None
    return next((spec for spec in FORMATS.values() if spec.weight_block == block), None)
