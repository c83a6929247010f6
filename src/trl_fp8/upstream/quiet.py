"""Filters that hide single messages of other libraries.

`without_noise` hides them inside a block, around imports and the start of an engine. `quiet` hides them until the
process ends; programs of this package call it before they import torch. Only the messages listed here are hidden: no
logger, warning category or stream is silenced completely. TRL_FP8_VERBOSE=1 shows all messages.
"""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .versions import VERSIONS


class Noise(NamedTuple):
    """A message of another library that is hidden."""

    where: str | type[Warning]  # name of the logger, or category of the warning
    text: str  # regular expression that matches the beginning of the message
    why: str  # why nobody needs to read it


LOGGED = (
    Noise(
        "torchao",
        r"Failed to load .*\.so: ",
        "It tries to load all of its CUDA extensions. This package calls none of them.",
    ),
    Noise(
        "torch.utils._pytree", r"<enum .*register_constant\(\)", "torchao 0.18 registers an enum when it is imported."
    ),
    Noise("vllm.triton_utils.importing", r"Triton is installed, but", "On a CPU there is nothing for Triton to do."),
    Noise("matplotlib.font_manager", r"Matplotlib is building the font cache", "It does so once, for some seconds."),
    Noise("DeepSpeed", r"Setting accelerator to CPU\.", "TRL imports DeepSpeed, also for runs that do not use it."),
)
WARNED = (
    Noise(
        UserWarning,
        rf"TRL currently supports vLLM .* You have version ({'|'.join(map(re.escape, VERSIONS))})\.",
        "trl-fp8 was tested with this version.",
    ),
    Noise(
        FutureWarning,
        r"`torch\.distributed\.reduce_op` is deprecated",
        "vLLM reads all names of every module, also deprecated ones.",
    ),
)
# Environment variables that `quiet` sets: tqdm draws no bar in the first second, in which a small model loads
SETTINGS = {"TQDM_DELAY": "1"}
VERBOSE = "TRL_FP8_VERBOSE"  # environment variable that switches the filters off


@contextmanager
def without_noise() -> Iterator[None]:
    """Hide the messages in `LOGGED` and `WARNED` inside the block. Keep the filters that libraries add meanwhile."""
    if _shows_all():
        yield
        return
    filters_before = list(warnings.filters)
    loggers = _add_filters()
    added = [each for each in warnings.filters if each not in filters_before]
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_shown)
        warnings.filters[:] = [each for each in warnings.filters if each not in added]


def quiet() -> None:
    """Hide the messages in `LOGGED` and `WARNED` for the rest of this process. Set `SETTINGS`."""
    if not _shows_all():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        _add_filters()


def is_shown(record: logging.LogRecord) -> bool:
    """Return False for a record that `LOGGED` lists. Serves as a logger's filter."""
    text = record.getMessage()
    for noise in LOGGED:
        if noise.where == record.name and re.match(noise.text, text):
            return False
    return True


def _add_filters() -> list[logging.Logger]:
    """Filter `LOGGED` and `WARNED`. Return the loggers to which this call added the filter."""
    filtered = []
    for noise in LOGGED:
        logger = logging.getLogger(noise.where)
        if is_shown not in logger.filters:
            logger.addFilter(is_shown)
            filtered.append(logger)
    for noise in WARNED:
        warnings.filterwarnings("ignore", noise.text, noise.where)
    return filtered


def _shows_all() -> bool:
    """Return whether the user switched the filters off."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")
