"""`FP8GOLDTrainer`: TRL's `GOLDTrainer` with FP8 rollouts."""

from dataclasses import dataclass
from functools import wraps
from inspect import signature

from trl.experimental.gold import GOLDConfig, GOLDTrainer

from trl_fp8.config import documented, groups_for
from trl_fp8.engine.protocol import RolloutEngine
from trl_fp8.rollouts import FP8Rollouts

from .buffered import Buffered, BufferedConfig


@documented
@dataclass
class FP8GOLDConfig(BufferedConfig, *groups_for(GOLDConfig), GOLDConfig):
    """Configuration of `FP8GOLDTrainer`: every field of `trl.experimental.gold.GOLDConfig`, and the ones below."""


class FP8GOLDTrainer(Buffered, FP8Rollouts, GOLDTrainer):
    """TRL's `GOLDTrainer` whose rollouts run in FP8. Takes exactly its arguments."""

    config_class = FP8GOLDConfig
    _tag_names = ["trl", "gold", "fp8"]
    _name = "GOLD with FP8 rollouts"
    has_fused_head = True  # from `SFTTrainer`, of which GOLD's trainer is a subclass

    @wraps(GOLDTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(**signature(GOLDTrainer).bind(*args, **kwargs).arguments)

    def _make_own_generation(self, **kwargs) -> RolloutEngine:
        if self.args.own_engine:
            self._require_no_images()
        return super()._make_own_generation(**kwargs)

    def _require_no_images(self) -> None:
        """Raise `ValueError` for a dataset with images. TRL buffers rows of it, and makes tokens of them only for the
        loss, so `Buffered._fill_buffer` has no batch for features.
        """
        for column in ("image", "images"):
            if column in (getattr(self.train_dataset, "column_names", None) or ()):
                raise ValueError(
                    f"train_dataset has a column {column!r}, and {type(self).__name__} takes no images with FP8 "
                    "rollouts. Remove the column, or switch FP8 off: fp8_weights=False with kv_cache_dtype='auto'."
                )

    @classmethod
    def trl_class(cls) -> type:
        return GOLDTrainer  # `FP8Rollouts` would find its parent, TRL's SFTTrainer, which has no engine

    @property
    def generated_slices(self) -> list[bool]:
        return self._buffered_on_policy
