"""`FP8IWOPDTrainer`: TRL's `IWOPDTrainer` with FP8 rollouts."""

from dataclasses import dataclass
from functools import wraps
from inspect import signature

from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.rollouts import FP8Rollouts

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
