"""Filters for other libraries' noise, message by message.

`without_noise` is around imports and the start of an engine. `quiet` is for a whole program of this package, before
torch is imported. No logger, category or stream is silenced as a whole. TRL_FP8_VERBOSE=1 shows everything.
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
    """One message of another library: where it is sent, how its text begins, and why nobody has to read it."""

    where: str | type[Warning]  # a logger's name, or a warning's category
    text: str  # regular expression
    why: str


LOGGED = (
    Noise("torchao", r"Failed to load .*\.so: ", "It tries all its extensions for CUDA, and nothing here calls them."),
    Noise("torch.utils._pytree", r"<enum .*register_constant\(\)", "torchao 0.18 does so at its import."),
    Noise("vllm.triton_utils.importing", r"Triton is installed, but", "On a CPU there is nothing for Triton to do."),
    Noise("matplotlib.font_manager", r"Matplotlib is building the font cache", "It happens once, and takes seconds."),
    Noise("DeepSpeed", r"Setting accelerator to CPU\.", "TRL imports it; where it is used, it says what it runs on."),
)
WARNED = (
    Noise(
        UserWarning,
        rf"TRL currently supports vLLM .* You have version ({'|'.join(map(re.escape, VERSIONS))})\.",
        "trl-fp8 was tested with it.",
    ),
    Noise(FutureWarning, r"`torch\.distributed\.reduce_op` is deprecated", "vLLM reads every module's names."),
)
SETTINGS = {"TQDM_DELAY": "1"}  # tqdm draws no bar in the first second: a small model loads without
VERBOSE = "TRL_FP8_VERBOSE"  # environment variable


@contextmanager
def without_noise() -> Iterator[None]:
    """Hide `LOGGED` and `WARNED` inside the block. Filters that libraries add at their import stay."""
    if _shows_all():
        yield
        return
    before = list(warnings.filters)
    loggers = _filter()
    added = [each for each in warnings.filters if each not in before]
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_news)
        warnings.filters[:] = [each for each in warnings.filters if each not in added]


def quiet() -> None:
    """Hide `LOGGED` and `WARNED` in this process."""
    if not _shows_all():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        _filter()


def is_news(record: logging.LogRecord) -> bool:
    """Return False for a record that `LOGGED` names. A logger's filter."""
    text = record.getMessage()
    return not any(noise.where == record.name and re.match(noise.text, text) for noise in LOGGED)


def _filter() -> list[logging.Logger]:
    """Add the filters. Return the loggers that had none."""
    loggers = [logging.getLogger(noise.where) for noise in LOGGED]
    loggers = [logger for logger in loggers if is_news not in logger.filters]
    for logger in loggers:
        logger.addFilter(is_news)
    for noise in WARNED:
        warnings.filterwarnings("ignore", noise.text, noise.where)
    return loggers


def _shows_all() -> bool:
    return os.environ.get(VERBOSE, "0") not in ("", "0")
