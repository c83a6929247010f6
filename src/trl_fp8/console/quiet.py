"""Other libraries' noise, named message by message, and left out of what our commands and examples print.

`quiet` is for the start of a program, before torch is imported. Importing this package changes nothing, and no logger,
category or stream is silenced as a whole: what is not in these lists comes through.
"""

import logging
import os
import re
import warnings
from typing import NamedTuple


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
    Noise(FutureWarning, r"`torch\.distributed\.reduce_op` is deprecated", "vLLM 0.31 reads every module's names."),
)
# tqdm draws no bar of a job that is done within a second, such as "Loading weights" and "Writing model shards" of a
# small model. Those of large ones are drawn
SETTINGS = {"TQDM_DELAY": "1"}


def quiet() -> None:
    """Leave out what `LOGGED` and `WARNED` name, in this process."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in {noise.where for noise in LOGGED}:
        logging.getLogger(name).addFilter(is_news)
    for noise in WARNED:
        warnings.filterwarnings("ignore", noise.text, noise.where)


def is_news(record: logging.LogRecord) -> bool:
    """A logger's filter: False for what `LOGGED` names."""
    text = record.getMessage()
    return not any(noise.where == record.name and re.match(noise.text, text) for noise in LOGGED)
