"""Rollout correction: importance weights and rejection from the trainer's and the engine's log-probs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trl_fp8.run.registration import Registration

from .correction_flags import CorrectionFlags


if TYPE_CHECKING:
    from trl_fp8.run.feature import Feature


def _features(trainer) -> "Iterator[Feature]":
    if trainer.args.correction is not None:
        from .correction import Correction

        yield Correction(trainer)


REGISTRATION = Registration(flags=CorrectionFlags, features=_features, needs="vllm_importance_sampling_correction")
