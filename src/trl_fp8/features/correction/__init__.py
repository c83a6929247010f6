"""Rollout correction: importance weights and rejection from the trainer's and the engine's log-probs."""

from collections.abc import Iterator, Mapping
from typing import Any

from trl_fp8.run.feature import Registration

from .correction_flags import CorrectionFlags
from .health import health_warnings


def _features(trainer) -> Iterator:
    if trainer.args.correction is not None:
        from .correction import Correction

        yield Correction(trainer)


def _warnings(metrics: Mapping[str, float], facts: Mapping[str, Any]) -> dict[str, str]:
    correction = facts.get("correction") or {}
    return health_warnings(metrics, correction.get("level"), correction.get("monitor_only", False))


REGISTRATION = Registration(
    flags=CorrectionFlags,
    features=_features,
    warnings=_warnings,
    needs="vllm_importance_sampling_correction",
)
