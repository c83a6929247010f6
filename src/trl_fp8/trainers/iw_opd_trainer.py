"""`FP8IWOPDTrainer`: TRL's `IWOPDTrainer` with FP8 rollouts."""

import sys
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any

from accelerate import skip_first_batches
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.rollouts import FP8Rollouts
from trl_fp8.upstream.patches import substituted

from .buffered import Buffered, BufferedConfig


@documented
@dataclass
class FP8IWOPDConfig(BufferedConfig, *groups_for(IWOPDConfig), IWOPDConfig):
    """Configuration of `FP8IWOPDTrainer`: every field of `trl.experimental.iw_opd.IWOPDConfig`, and the ones below."""


class FP8IWOPDTrainer(Buffered, FP8Rollouts, IWOPDTrainer):
    """TRL's `IWOPDTrainer` whose rollouts run in FP8. Takes exactly its arguments."""

    config_class = FP8IWOPDConfig
    _tag_names = ["trl", "iw-opd", "fp8"]
    _name = "IWOPD with FP8 rollouts"

    @wraps(IWOPDTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(**signature(IWOPDTrainer).bind(*args, **kwargs).arguments)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        if not self.features:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        with substituted(sys.modules["transformers.trainer"], "skip_first_batches", skip_repeated_batches):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @property
    def _step(self) -> int:
        """Return the number of batches that were trained on, under GRPO's name."""
        return self._buffer_step

    @property
    def _tokenizer(self) -> object:
        return self.processing_class

    @property
    def generated_slices(self) -> list[bool]:
        return self._buffered_on_policy_flags


def skip_repeated_batches(loader: Any, count: int) -> Any:
    """Return TRL's loader, which yields each batch `repeat_count` times in turn, without its first `count` yields.

    transformers counts whole optimizer steps, so `count` is a multiple of `repeat_count`. accelerate's function would
    make a loader that repeats nothing, and would skip `count` different batches.
    """
    rest = skip_first_batches(loader.dataloader, count // loader.repeat_count)
    return type(loader)(rest, loader.repeat_count)
